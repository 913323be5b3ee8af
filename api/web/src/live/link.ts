// A tab's end of the one stream: the latest of everything, and a way to hear what happens to one job.

import type { JobSummary, JobView, NodeView } from "../api/client";
import { Hub } from "./hub";
import type { FromHub, FromTab, LinkState, Told } from "./messages";
import { Store } from "./store";

const ALIVE_MS = 20_000;

export interface Listener {
  /** Everything after `from` will be told. */
  watching(from: string): void;
  told(told: Told): void;
}

export class Link {
  readonly state = new Store<{ state: LinkState; since: number }>({ state: "connecting", since: Date.now() });
  readonly summaries = new Store<ReadonlyMap<string, JobSummary>>(new Map());
  readonly nodes = new Store<readonly NodeView[] | null>(null);
  readonly jobs = new Store<ReadonlyMap<string, JobView>>(new Map());
  private readonly listeners = new Map<string, Map<Listener, string>>();
  private send: (message: FromTab) => void = () => undefined;

  connect(): void {
    this.send = typeof SharedWorker === "undefined" ? this.alone() : this.shared();
    setInterval(() => this.send({ ask: "alive" }), ALIVE_MS);
    addEventListener("pagehide", () => this.send({ ask: "bye" }));
    // Back from the browser's cache of pages: the hub has forgotten this tab.
    addEventListener("pageshow", (event) => {
      if (event.persisted) for (const [job, all] of this.listeners) for (const after of all.values()) this.send({ ask: "watch", job, after });
    });
  }

  /** after: the last entry the listener has. The returned function ends it. */
  watch(job: string, after: string, listener: Listener): () => void {
    const all = this.listeners.get(job) ?? new Map<Listener, string>();
    this.listeners.set(job, all);
    all.set(listener, after);
    this.send({ ask: "watch", job, after });
    return () => {
      all.delete(listener);
      if (all.size > 0) return;
      this.listeners.delete(job);
      this.send({ ask: "leave", job });
    };
  }

  private shared(): (message: FromTab) => void {
    const worker = new SharedWorker(new URL("./worker.ts", import.meta.url), { type: "module", name: "everstep" });
    worker.port.onmessage = (event: MessageEvent<FromHub>) => this.hear(event.data);
    return (message) => worker.port.postMessage(message);
  }

  private alone(): (message: FromTab) => void {
    const hub = new Hub("/api/v1/live");
    const port = { post: (message: FromHub) => this.hear(message) };
    hub.join(port);
    return (message) => hub.hear(port, message);
  }

  private hear(message: FromHub): void {
    if (message.say === "link") this.state.set({ state: message.state, since: message.since });
    else if (message.say === "watching") for (const one of this.listeners.get(message.job)?.keys() ?? []) one.watching(message.from);
    else this.take(message.told);
  }

  private take(told: Told): void {
    switch (told.kind) {
      case "summary":
        this.summaries.set(new Map(this.summaries.value).set(told.data.id, told.data));
        this.merge(told.data);
        break;
      case "nodes":
        this.nodes.set(told.data);
        break;
      case "job":
        this.jobs.set(new Map(this.jobs.value).set(told.data.id, told.data));
        break;
      case "history":
      case "step":
      case "gap":
        for (const one of this.listeners.get(told.data.job)?.keys() ?? []) one.told(told);
        break;
      case "pulse":
        break;
    }
  }

  /** Figures that move with every step come with summaries only. */
  private merge(summary: JobSummary): void {
    const page = this.jobs.value.get(summary.id);
    if (page && page.generation <= summary.generation) this.jobs.set(new Map(this.jobs.value).set(summary.id, { ...page, ...summary }));
  }
}

export const link = new Link();
