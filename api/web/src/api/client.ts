// The generated shapes under short names, and one way to ask: an answer, or a Problem that says what is wrong in words.

import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

type Shapes = components["schemas"];
export type JobSummary = Shapes["JobSummary"];
export type JobView = Shapes["JobView"];
export type StepView = Shapes["StepView"];
export type EventView = Shapes["EventView"];
export type IncidentView = Shapes["IncidentView"];
export type PlanView = Shapes["PlanView"];
export type SeatView = Shapes["SeatView"];
export type NodeView = Shapes["NodeView"];
export type FaultView = Shapes["FaultView"];
export type ForecastView = Shapes["ForecastView"];
export type ServerView = Shapes["ServerView"];
export type WhoView = Shapes["WhoView"];
export type JobStatus = Shapes["JobStatus"];
export type Role = Shapes["Role"];
export type WebhookView = Shapes["WebhookView"];
export type DeliveryView = Shapes["DeliveryView"];
export type Occasion = Shapes["Occasion"];

const api = createClient<paths>({ baseUrl: globalThis.location?.origin ?? "" });

export interface FieldProblem {
  field: string;
  message: string;
}

export class Problem extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly fields: readonly FieldProblem[] = [],
  ) {
    super(message);
  }
}

interface Answer<T> {
  data?: T;
  error?: unknown;
  response: Response;
}

let refused: () => void = () => undefined;

/** What to do when the server no longer knows who asks. */
export function whenRefused(act: () => void): void {
  refused = act;
}

/** The data of an answer. Throws Problem, also where nobody answered. */
async function asked<T>(asking: Promise<Answer<T>>): Promise<T> {
  let answer: Answer<T>;
  try {
    answer = await asking;
  } catch {
    throw new Problem("the server does not answer; it may be restarting", 0);
  }
  if (answer.response.ok) return answer.data as T;
  if (answer.response.status === 401) refused();
  throw problemOf(answer.error, answer.response.status);
}

function problemOf(body: unknown, status: number): Problem {
  if (typeof body !== "object" || body === null) return new Problem(`the server answered ${status}`, status);
  const said = body as { detail?: unknown; errors?: unknown };
  const detail = typeof said.detail === "string" ? said.detail : `the server answered ${status}`;
  const fields = Array.isArray(said.errors) ? (said.errors as FieldProblem[]) : [];
  return new Problem(detail, status, fields);
}

/** Of a request that may be sent again without being done twice. */
export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- what is asked, by name; shapes are those of the document, which openapi-fetch loosens on their way ------------------------

export type JobPage = Shapes["JobPage"];
type Accepted = Shapes["AcceptedView"];

/** A job file, as it was written: JSON or YAML. */
export function submit(text: string, key: string): Promise<Shapes["SubmittedView"]> {
  return asked(
    api.POST("/api/v1/jobs", {
      body: text as never,
      bodySerializer: (body: unknown) => body as string,
      params: { header: { "Idempotency-Key": key } },
      headers: { "Content-Type": "application/yaml" },
    }),
  );
}

/** Which jobs a list shows; what is left out is any. */
export interface Wanted {
  states: readonly JobStatus[];
  name: string | null;
  project: string | null;
  user: string | null;
  labels: Readonly<Record<string, string>>;
}

export function listJobs(limit: number, cursor: string | null, wanted: Wanted): Promise<JobPage> {
  const { states, name, project, user } = wanted;
  const label = Object.entries(wanted.labels).map(([key, value]) => `${key}=${value}`);
  const some = { ...(cursor ? { cursor } : {}), ...(name ? { name } : {}), ...(project ? { project } : {}), ...(user ? { user } : {}) };
  const query = { limit, ...some, ...(label.length ? { label } : {}), ...(states.length ? { state: [...states] } : {}) };
  return asked(api.GET("/api/v1/jobs", { params: { query } }));
}

export type Bulk = Shapes["BulkView"];

/** Of the open jobs that are wanted; isDry: only say which those are. Whose they are is no part of such a command. */
export function toMany(verb: "cancel" | "pause" | "resume", wanted: Wanted, isDry: boolean): Promise<Bulk> {
  const { name, project } = wanted;
  const body = { state: [...wanted.states], labels: { ...wanted.labels }, dry_run: isDry, ...(name ? { name } : {}), ...(project ? { project } : {}) };
  if (verb === "cancel") return asked(api.POST("/api/v1/jobs:cancel", { body })) as Promise<Bulk>;
  if (verb === "pause") return asked(api.POST("/api/v1/jobs:pause", { body })) as Promise<Bulk>;
  return asked(api.POST("/api/v1/jobs:resume", { body })) as Promise<Bulk>;
}

export function getJob(job: string): Promise<JobView> {
  return asked(api.GET("/api/v1/jobs/{job_id}", { params: { path: { job_id: job } } })) as Promise<JobView>;
}

export function stepsOf(job: string, since: number, limit: number): Promise<StepView[]> {
  return asked(api.GET("/api/v1/jobs/{job_id}/metrics", { params: { path: { job_id: job }, query: { since: String(since), limit } } }));
}

/** Where entries are gone, one of type gap stands in their place. */
export function historyOf(job: string, since: number, limit: number): Promise<EventView[]> {
  const params = { path: { job_id: job }, query: { since: String(since), limit } };
  return asked(api.GET("/api/v1/jobs/{job_id}/events", { params, headers: { Accept: "application/json" } })) as Promise<EventView[]>;
}

/** Of a rank of the current generation; null: of the one that failed, or the first. */
export function logOf(job: string, rank: number | null, tail: number): Promise<string> {
  const params = { path: { job_id: job }, query: { tail, ...(rank === null ? {} : { rank }) } };
  return asked(api.GET("/api/v1/jobs/{job_id}/logs", { params, parseAs: "text" })) as Promise<string>;
}

export type LogPage = Shapes["LogPageView"];

/** The last lines that hold these words, of one rank (null: of all, in the order of time). */
export function linesOf(job: string, rank: number | null, words: string, tail: number): Promise<LogPage> {
  const query = { tail, grep: words, ...(rank === null ? {} : { rank: [rank] }) };
  return asked(api.GET("/api/v1/jobs/{job_id}/logs/lines", { params: { path: { job_id: job }, query } })) as Promise<LogPage>;
}

/** Refused (412) where the job is not as it was at that revision. */
export function resize(job: string, target: number, revision: number): Promise<Accepted> {
  const params = { path: { job_id: job }, header: { "If-Match": `"${revision}"` } };
  return asked(api.PATCH("/api/v1/jobs/{job_id}", { params, body: { target } }));
}

export function cancel(job: string): Promise<Accepted> {
  return asked(api.POST("/api/v1/jobs/{job_id}:cancel", { params: { path: { job_id: job } } }));
}

export function pause(job: string): Promise<Accepted> {
  return asked(api.POST("/api/v1/jobs/{job_id}:pause", { params: { path: { job_id: job } } }));
}

export function resume(job: string): Promise<Accepted> {
  return asked(api.POST("/api/v1/jobs/{job_id}:resume", { params: { path: { job_id: job } } }));
}

export function checkpointNow(job: string): Promise<Accepted> {
  return asked(api.POST("/api/v1/jobs/{job_id}:checkpoint", { params: { path: { job_id: job } } }));
}

/** Where each generation trained, oldest first. */
export function plansOf(job: string): Promise<PlanView[]> {
  return asked(api.GET("/api/v1/jobs/{job_id}/plans", { params: { path: { job_id: job } } })) as Promise<PlanView[]>;
}

// --- the cluster -----------------------------------------------------------------------------------------------------------------

export function addNodes(kind: string, devices: number, number: number, labels: Record<string, string>): Promise<Accepted> {
  return asked(api.POST("/api/v1/nodes", { body: { kind, num_devices: devices, count: number, labels } }));
}

export function drainNode(node: string): Promise<Accepted> {
  return asked(api.POST("/api/v1/nodes/{node}:drain", { params: { path: { node } }, body: { remove: false } }));
}

export function removeNode(node: string, deadline: number | null): Promise<Accepted> {
  const query = deadline === null ? {} : { deadline_s: deadline };
  return asked(api.DELETE("/api/v1/nodes/{node}", { params: { path: { node }, query } }));
}

export function nodeVerb(node: string, verb: "cordon" | "uncordon" | "release"): Promise<Accepted> {
  const params = { path: { node } };
  if (verb === "cordon") return asked(api.POST("/api/v1/nodes/{node}:cordon", { params }));
  if (verb === "uncordon") return asked(api.POST("/api/v1/nodes/{node}:uncordon", { params }));
  return asked(api.POST("/api/v1/nodes/{node}:release", { params }));
}

export function killNode(node: string): Promise<Accepted> {
  return causeFault({ kind: "node_kill", node, beyond_mirrors: true });
}

export function killRank(job: string, rank: number): Promise<Accepted> {
  return causeFault({ kind: "kill", job, rank });
}

export function causeFault(request: Record<string, unknown>): Promise<Accepted> {
  return asked(api.POST("/api/v1/faults", { body: request as Shapes["FaultRequest"] }));
}

export function faultsOf(job: string): Promise<FaultView[]> {
  return asked(api.GET("/api/v1/jobs/{job_id}/faults", { params: { path: { job_id: job } } })) as Promise<FaultView[]>;
}

/** Both as text, YAML or JSON; an empty cluster is the one that is there. */
export function forecastOf(job: string, cluster: string): Promise<ForecastView> {
  return asked(
    api.POST("/api/v1/plans", {
      body: `${nested("job", job)}${cluster.trim() ? nested("cluster", cluster) : ""}` as never,
      bodySerializer: (body: unknown) => body as string,
      headers: { "Content-Type": "application/yaml" },
    }),
  ) as Promise<ForecastView>;
}

/** One document inside of another: YAML is nested by indentation, and JSON is YAML. */
function nested(name: string, text: string): string {
  return `${name}:\n${text.replace(/^/gm, "  ")}\n`;
}

// --- webhooks --------------------------------------------------------------------------------------------------------------------

export type MadeWebhook = Shapes["MadeWebhookView"];
export interface WantedWebhook {
  name: string;
  url: string;
  events: Occasion[];
  projects: string[];
  labels: Record<string, string>;
}

export function listWebhooks(): Promise<WebhookView[]> {
  return asked(api.GET("/api/v1/webhooks"));
}

export function getWebhook(id: string): Promise<WebhookView> {
  return asked(api.GET("/api/v1/webhooks/{webhook_id}", { params: { path: { webhook_id: id } } }));
}

/** The answer alone has the secret that its messages are signed with. */
export function createWebhook(wanted: WantedWebhook): Promise<MadeWebhook> {
  return asked(api.POST("/api/v1/webhooks", { body: wanted }));
}

export async function removeWebhook(id: string): Promise<void> {
  await asked(api.DELETE("/api/v1/webhooks/{webhook_id}", { params: { path: { webhook_id: id } } }));
}

export function webhookVerb(id: string, verb: "pause" | "resume"): Promise<WebhookView> {
  const params = { path: { webhook_id: id } };
  if (verb === "pause") return asked(api.POST("/api/v1/webhooks/{webhook_id}:pause", { params }));
  return asked(api.POST("/api/v1/webhooks/{webhook_id}:resume", { params }));
}

export function testWebhook(id: string): Promise<DeliveryView> {
  return asked(api.POST("/api/v1/webhooks/{webhook_id}:test", { params: { path: { webhook_id: id } } })) as Promise<DeliveryView>;
}

/** Newest first. */
export function deliveriesOf(id: string): Promise<DeliveryView[]> {
  return asked(api.GET("/api/v1/webhooks/{webhook_id}/deliveries", { params: { path: { webhook_id: id } } })) as Promise<DeliveryView[]>;
}

export function redeliver(id: string, delivery: string): Promise<DeliveryView> {
  const params = { path: { webhook_id: id, delivery_id: delivery } };
  return asked(api.POST("/api/v1/webhooks/{webhook_id}/deliveries/{delivery_id}:redeliver", { params })) as Promise<DeliveryView>;
}

// --- who asks --------------------------------------------------------------------------------------------------------------------

export function whoAmI(): Promise<WhoView> {
  return asked(api.GET("/api/v1/whoami"));
}

/** One of the two: what was pasted, or what stood in a login link. */
export function openSession(shown: { token: string } | { code: string }): Promise<WhoView> {
  return asked(api.POST("/api/v1/session", { body: shown as Shapes["SignInRequest"] }));
}

export async function endSession(): Promise<void> {
  await asked(api.DELETE("/api/v1/session"));
}

export function serverOf(): Promise<ServerView> {
  return asked(api.GET("/api/v1/version"));
}
