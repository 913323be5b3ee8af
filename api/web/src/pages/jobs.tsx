// All jobs: newest first, by state and by words, each line live; a form that submits a job file, and commands to many.

import { useEffect, useMemo, useState } from "preact/hooks";
import { listJobs, type JobStatus, type JobSummary, type Wanted } from "../api/client";
import { useAsked } from "../asking";
import { link } from "../live/link";
import { useStore } from "../live/store";
import { Empty, Loading, Progress, Status, Table, Trouble } from "../parts/basics";
import { go, place } from "../router";
import { useRights } from "../session";
import { age, compact, fixed } from "../words";
import { ManyDialog } from "./many";
import { SubmitDialog } from "./submit";

const PAGE = 50;
const OVER = new Set(["succeeded", "failed", "cancelled"]);
const GROUPS: readonly { name: string; label: string; states: readonly JobStatus[] }[] = [
  { name: "all", label: "All", states: [] },
  { name: "active", label: "Active", states: ["STARTING", "RUNNING", "RECOVERING", "RESIZING", "STOPPING", "PAUSING"] },
  { name: "waiting", label: "Waiting", states: ["PENDING", "PAUSED"] },
  { name: "succeeded", label: "Succeeded", states: ["SUCCEEDED"] },
  { name: "failed", label: "Failed", states: ["FAILED"] },
  { name: "cancelled", label: "Cancelled", states: ["CANCELLED"] },
];

export function JobsPage() {
  const { query } = useStore(place);
  const group = GROUPS.find((one) => one.name === query.get("state")) ?? GROUPS[0]!;
  const [isSubmitting, setSubmitting] = useState(false);
  const [isAskingMany, setAskingMany] = useState(false);
  const mayAct = useRights().may("operator");
  const only = query.get("only") ?? "";
  const wanted = useMemo(() => wantedOf(only, group.states), [only, group]);
  const isNarrowed = group.name !== "all" || only !== "";
  useEffect(() => {
    document.title = "Jobs · Everstep";
  }, []);
  return (
    <>
      <div class="heading">
        <h1 tabIndex={-1}>Jobs</h1>
        {mayAct ? (
          <button type="button" class="primary" onClick={() => setSubmitting(true)}>
            Submit a job
          </button>
        ) : null}
      </div>
      <div class="heading">
        <nav class="filters" aria-label="Jobs by state">
          {GROUPS.map((one) => (
            <a key={one.name} href={addressOf(one.name, only)} aria-current={one === group ? "true" : undefined}>
              {one.label}
            </a>
          ))}
        </nav>
        <div class="actions">
          <label class="search">
            <span class="unseen">Only jobs of this name, label=value, project:NAME or user:NAME</span>
            <input
              type="search"
              placeholder="name, team=nlp, project:…, user:…"
              value={only}
              onChange={(event) => go(addressOf(group.name, event.currentTarget.value.trim()), true)}
            />
          </label>
          {mayAct && isNarrowed && !OVER.has(group.name) && !wanted.user ? (
            <button type="button" onClick={() => setAskingMany(true)}>
              All of these…
            </button>
          ) : null}
        </div>
      </div>
      <Listed key={`${group.name} ${only}`} wanted={wanted} isNarrowed={isNarrowed} submit={mayAct ? () => setSubmitting(true) : null} />
      {isAskingMany ? <ManyDialog wanted={wanted} close={() => setAskingMany(false)} /> : null}
      {isSubmitting ? <SubmitDialog close={() => setSubmitting(false)} then={(job) => go(`/jobs/${job}`)} /> : null}
    </>
  );
}

/** `byte-gpt team=nlp project:web user:ci`: a name, labels, a project, whose token. */
function wantedOf(text: string, states: readonly JobStatus[]): Wanted {
  const wanted = { states, name: null as string | null, project: null as string | null, user: null as string | null, labels: {} as Record<string, string> };
  for (const word of text.split(/\s+/).filter(Boolean)) {
    const label = word.indexOf("=");
    if (label > 0) wanted.labels[word.slice(0, label)] = word.slice(label + 1);
    else if (word.startsWith("project:")) wanted.project = word.slice(8);
    else if (word.startsWith("user:")) wanted.user = word.slice(5);
    else wanted.name = word;
  }
  return wanted;
}

function addressOf(group: string, only: string): string {
  const query = new URLSearchParams({ ...(group === "all" ? {} : { state: group }), ...(only ? { only } : {}) }).toString();
  return query ? `/jobs?${query}` : "/jobs";
}

function Listed({ wanted, isNarrowed, submit }: { wanted: Wanted; isNarrowed: boolean; submit: (() => void) | null }) {
  const [pages, setPages] = useState<{ jobs: readonly JobSummary[]; next: string | null }>({ jobs: [], next: null });
  const first = useAsked(() => listJobs(PAGE, null, wanted), JSON.stringify(wanted));
  useEffect(() => {
    if (first.data) setPages({ jobs: first.data.jobs, next: first.data.next_cursor });
  }, [first.data]);
  const summaries = useStore(link.summaries);
  const jobs = useMemo(() => merged(pages.jobs, summaries, wanted), [pages, summaries, wanted]);
  const more = async () => {
    const found = await listJobs(PAGE, pages.next, wanted);
    setPages((before) => ({ jobs: [...before.jobs, ...found.jobs], next: found.next_cursor }));
  };
  if (first.problem) return <Trouble problem={first.problem} />;
  if (first.isLoading) return <Loading lines={6} />;
  if (jobs.length === 0) return <Nothing isFiltered={isNarrowed} submit={submit} />;
  return (
    <>
      <Table label="Jobs" asCards head={["Job", "State", "Progress", "#Loss", "#Tokens/s", "#Recoveries", "Plan", "#Age"]}>
        {jobs.map((job) => (
          <Row key={job.id} job={job} />
        ))}
      </Table>
      {pages.next ? (
        <button type="button" class="quiet more" onClick={more}>
          Show older jobs
        </button>
      ) : null}
    </>
  );
}

function Row({ job }: { job: JobSummary }) {
  return (
    <tr>
      <th scope="row">
        <a href={`/jobs/${job.id}`}>{job.name}</a>
        <small class="id">{job.id}</small>
      </th>
      <td>
        <Status word={job.status} />
        {job.status === "PENDING" || job.status === "FAILED" ? <small class="why">{job.reason}</small> : null}
      </td>
      <td class="steps">
        <Progress done={job.step} of={job.steps} word={job.status} />
        <small>
          {compact(job.step)} of {compact(job.steps)}
        </small>
      </td>
      <td class="number" data-label="loss">{fixed(job.loss, 4)}</td>
      <td class="number" data-label="tokens/s">{job.tokens_per_s ? compact(job.tokens_per_s) : "–"}</td>
      <td class="number" data-label="recoveries">{job.recoveries || "–"}</td>
      <td class="plan" data-label="plan">{job.plan_summary?.split(" on ")[0] ?? "–"}</td>
      <td class="number" data-label="age">{age(job.created_at)}</td>
    </tr>
  );
}

function Nothing({ isFiltered, submit }: { isFiltered: boolean; submit: (() => void) | null }) {
  if (isFiltered) return <Empty title="No job is so." />;
  if (!submit) return <Empty title="No job has been submitted yet." />;
  return (
    <Empty title="No job has been submitted yet.">
      <p>
        Submit a job file here, or <code>everstep submit worker/examples/byte-gpt.yaml</code> in a terminal.
      </p>
      <button type="button" class="primary" onClick={submit}>
        Submit a job
      </button>
    </Empty>
  );
}

/** What was listed, as it is now, and those that have come since; ids grow with time. */
function merged(listed: readonly JobSummary[], live: ReadonlyMap<string, JobSummary>, wanted: Wanted): JobSummary[] {
  const all = new Map(listed.map((job) => [job.id, job]));
  const oldest = listed.at(-1)?.id ?? "";
  for (const job of live.values()) if (all.has(job.id) || job.id > oldest) all.set(job.id, job);
  return [...all.values()].filter((job) => isWanted(job, wanted, listed)).sort((a, b) => (a.id < b.id ? 1 : -1));
}

/** listed: what the server found, which also knows tokens by their ids. */
function isWanted(job: JobSummary, { states, name, project, user, labels }: Wanted, listed: readonly JobSummary[]): boolean {
  return (
    (states.length === 0 || states.includes(job.status as JobStatus)) &&
    (name === null || job.name === name) &&
    (project === null || job.project === project) &&
    (user === null || job.user === user || listed.some((one) => one.id === job.id)) &&
    Object.entries(labels).every(([key, value]) => job.labels[key] === value)
  );
}
