// What tabs and the hub say to each other, and what the server's one stream carries.

import type { EventView, JobSummary, JobView, NodeView, StepView } from "../api/client";

export type Told =
  | { kind: "summary"; data: JobSummary }
  | { kind: "nodes"; data: NodeView[] }
  | { kind: "pulse"; data: { at: string } }
  | { kind: "job"; data: JobView }
  | { kind: "history"; data: EventView & { job: string } }
  | { kind: "step"; data: StepView & { job: string } }
  | { kind: "gap"; data: { id: string; job: string; resumes_at: string } };

export type Kind = Told["kind"];
export const KINDS: readonly Kind[] = ["summary", "nodes", "pulse", "job", "history", "step", "gap"];

export type LinkState = "connecting" | "live" | "stale";

/** after: the last entry the tab has; what comes later is told. */
export type FromTab =
  | { ask: "watch"; job: string; after: string }
  | { ask: "leave"; job: string }
  | { ask: "alive" }
  | { ask: "bye" };

/** watching: everything after `from` will be told, so what lies between is the tab's to fetch. */
export type FromHub =
  | { say: "link"; state: LinkState; since: number }
  | { say: "told"; told: Told }
  | { say: "watching"; job: string; from: string };

/** What a hub speaks through: a MessagePort, or the tab itself where there are no shared workers. */
export interface Port {
  post(message: FromHub): void;
}
