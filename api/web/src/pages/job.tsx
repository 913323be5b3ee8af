// One job: who it is, how it is, what can be done about it, and its parts below (overview, map, incidents, events).

import { useEffect, useMemo, useState } from "preact/hooks";
import { cancel, checkpointNow, getJob, pause, resume, type JobView } from "../api/client";
import { useAsked } from "../asking";
import { JobLog } from "../live/joblog";
import { link } from "../live/link";
import { useStore } from "../live/store";
import { Loading, Progress, Status, Trouble } from "../parts/basics";
import { Dialog } from "../parts/dialog";
import { useRights } from "../session";
import { count, duration, when } from "../words";
import { Events } from "./events";
import { Incidents } from "./incidents";
import { MapPart } from "./map";
import { Overview } from "./overview";
import { ScaleDialog } from "./scale";

const PARTS = [
  { name: "", label: "Overview" },
  { name: "map", label: "Cluster map" },
  { name: "incidents", label: "Incidents" },
  { name: "events", label: "Events and logs" },
] as const;
const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

export function JobPage({ id, part }: { id: string; part: string }) {
  const first = useAsked(() => getJob(id), id);
  const told = useStore(link.jobs).get(id);
  const job = told ?? first.data;
  const log = useMemo(() => new JobLog(id), [id]);
  const isKnown = job !== null;
  useEffect(() => {
    if (!isKnown) return;
    void log.start();
    return () => log.stop();
  }, [log, isKnown]);
  useEffect(() => {
    document.title = `${job?.name ?? "Job"} · Everstep`;
  }, [job?.name]);
  if (!job) return first.problem ? <Unknown message={<Trouble problem={first.problem} />} /> : <Loading lines={8} />;
  return (
    <>
      <Head job={job} />
      <nav class="tabs" aria-label="Parts of this job">
        {PARTS.map((one) => (
          <a key={one.name} href={one.name ? `/jobs/${id}/${one.name}` : `/jobs/${id}`} aria-current={one.name === part ? "page" : undefined}>
            {one.label}
            {one.name === "incidents" && job.incidents.length ? <span class="count">{job.incidents.length}</span> : null}
          </a>
        ))}
      </nav>
      <Part name={part} job={job} log={log} />
    </>
  );
}

function Part({ name, job, log }: { name: string; job: JobView; log: JobLog }) {
  switch (name) {
    case "map":
      return <MapPart job={job} />;
    case "incidents":
      return <Incidents job={job} />;
    case "events":
      return <Events job={job} log={log} />;
    default:
      return <Overview job={job} log={log} />;
  }
}

function Unknown({ message }: { message: preact.ComponentChildren }) {
  return (
    <>
      <h1 tabIndex={-1}>Job</h1>
      {message}
      <p>
        <a href="/jobs">All jobs</a>
      </p>
    </>
  );
}

function Head({ job }: { job: JobView }) {
  const [asking, setAsking] = useState<"scale" | "cancel" | "checkpoint" | "pause" | "resume" | null>(null);
  const close = () => setAsking(null);
  const isOver = OVER.has(job.status);
  const mayAct = useRights().may("operator");
  const turn = job.status === "PAUSED" || job.status === "PAUSING" ? "resume" : "pause";
  const left = job.typical_step_s ? (job.steps - job.step) * job.typical_step_s : null;
  return (
    <header class="job-head">
      <div class="heading">
        <div>
          <h1 tabIndex={-1}>
            {job.name} <Status word={job.status} />
          </h1>
          <p class="id">
            {job.id}
            {job.generation ? ` · generation ${job.generation}` : ""}
          </p>
        </div>
        {isOver || !mayAct ? null : (
          <div class="actions">
            <button type="button" onClick={() => setAsking("scale")}>
              Scale
            </button>
            <button type="button" onClick={() => setAsking("checkpoint")}>
              Checkpoint now
            </button>
            <button type="button" onClick={() => setAsking(turn)}>
              {turn === "pause" ? "Pause" : "Resume"}
            </button>
            <button type="button" class="danger" onClick={() => setAsking("cancel")}>
              Cancel job
            </button>
          </div>
        )}
      </div>
      {job.reason && !job.failure ? <p class="reason">{job.reason}</p> : null}
      {job.next_action_at ? (
        <p class="reason">
          {job.started_at ? "Saved and ended at" : "Given up unless it trains by"} {when(job.next_action_at)}.
        </p>
      ) : null}
      {job.at_risk ? <p class="reason warn">At risk: {job.at_risk}</p> : null}
      <div class="progress-line">
        <Progress done={job.step} of={job.steps} word={job.status} />
        <span>
          step <strong>{count(job.step)}</strong> of {count(job.steps)}
          {!isOver && left !== null ? `, ${duration(left)} left` : ""}
        </span>
      </div>
      {asking === "scale" ? <ScaleDialog job={job} close={close} /> : null}
      {asking === "checkpoint" ? (
        <Dialog title="Make a checkpoint now?" verb="Make it" close={close} act={async () => (await checkpointNow(job.id)).message}>
          <p>The next step is saved as soon as it is committed. Training waits for no more than the copy in memory.</p>
        </Dialog>
      ) : null}
      {asking === "pause" ? (
        <Dialog title={`Pause ${job.name}?`} verb="Pause the job" close={close} act={async () => (await pause(job.id)).message}>
          <p>It makes one more step, saves it, and gives its devices back until it is resumed. No step is lost; going on takes a start.</p>
        </Dialog>
      ) : null}
      {asking === "resume" ? (
        <Dialog title={`Resume ${job.name}?`} verb="Resume it" close={close} act={async () => (await resume(job.id)).message}>
          <p>It goes on from step {count(job.step)} as soon as there are devices for it.</p>
        </Dialog>
      ) : null}
      {asking === "cancel" ? (
        <Dialog title={`Cancel ${job.name}?`} verb="Cancel the job" leave="Leave it" isDangerous close={close} act={async () => (await cancel(job.id)).message}>
          <p>
            It ends at step {count(job.step)} and gives its devices back. A cancelled job cannot go on; a new one can begin from its newest checkpoint
            {job.checkpoint ? `, of step ${count(job.checkpoint.step)}` : ", of which there is none yet"}.
          </p>
        </Dialog>
      ) : null}
    </header>
  );
}
