// How a job does: its curve, its rate, and where its time goes.

import { useMemo } from "preact/hooks";
import type { JobView, StepView } from "../api/client";
import { curveOf, median, rate, type Curve } from "../curve";
import type { JobLog } from "../live/joblog";
import { useStore } from "../live/store";
import { Card, Empty, Figure, Loading, Trouble } from "../parts/basics";
import { Chart, type Line, type Mark } from "../parts/chart";
import { compact, count, duration, fixed, percent, plain, plural, seconds, share, when } from "../words";
import { Goodput } from "./goodput";
import { Ranks } from "./ranks";

const RECENT = 20;

export function Overview({ job, log }: { job: JobView; log: JobLog }) {
  const { steps, isLoading, problem } = useStore(log.store);
  const curve = useMemo(() => curveOf(steps), [steps]);
  return (
    <>
      {job.failure ? <Failure job={job} /> : null}
      <Figures job={job} curve={curve} />
      {problem ? <Trouble problem={problem} /> : null}
      {isLoading ? <Loading lines={5} /> : <Curves job={job} curve={curve} />}
      <div class="columns">
        <Goodput job={job} />
        <Facts job={job} />
      </div>
    </>
  );
}

function Figures({ job, curve }: { job: JobView; curve: Curve }) {
  const recent = curve.counted.slice(-RECENT);
  const pace = median(recent.flatMap((step) => (step.seconds === null ? [] : [step.seconds])));
  const last = recent.at(-1);
  const again = curve.again.reduce((sum, stretch) => sum + stretch.length, 0);
  return (
    <dl class="figures">
      <Figure name="Loss" value={fixed(last?.loss ?? job.loss, 4)} />
      {job.evaluation ? (
        <Figure name="Held-out loss" value={fixed(job.evaluation.loss, 4)} note={`after step ${count(job.evaluation.step)}`} />
      ) : null}
      <Figure name="Tokens/s" value={last && pace ? compact(last.tokens / pace) : "–"} note={`median of ${RECENT} steps`} />
      <Figure name="Step" value={seconds(pace ?? job.typical_step_s)} note={job.tokens_per_step ? `${count(job.tokens_per_step)} tokens` : ""} />
      <Figure name="MFU" value={share(job.mfu)} note="by data sheets, bf16" title="6 operations per parameter and token, of what the devices could do" />
      <Figure name="Goodput" value={percent(job.goodput?.share)} note="since it started" />
      <Figure name="Recoveries" value={job.recoveries} note={job.false_alarms ? plural(job.false_alarms, "false alarm") : "no false alarm"} />
      <Figure name="Steps run again" value={again} note={again ? "shown in grey" : "none was lost"} />
    </dl>
  );
}

function Curves({ job, curve }: { job: JobView; curve: Curve }) {
  const loss = useMemo(() => lineOf(curve.counted, (step) => step.loss), [curve]);
  const rates = useMemo(() => lineOf(curve.counted, rate), [curve]);
  const held = useMemo(() => evaluations(curve, job), [curve, job.evaluation]);
  const again = useMemo(() => curve.again.map((stretch) => lineOf(stretch, (step) => step.loss)), [curve]);
  const ratesAgain = useMemo(() => curve.again.map((stretch) => lineOf(stretch, rate)), [curve]);
  const marks = useMemo(() => marksOf(job), [job.incidents]);
  const busy = useMemo(() => busyOf(curve.counted), [curve]);
  const busyAgain = useMemo(() => curve.again.map((stretch) => busyOf(stretch).slowest).filter((one) => one.x.length), [curve]);
  if (curve.counted.length === 0) return <Empty title={job.status === "PENDING" ? "It has not started yet." : "No step has been committed yet."} />;
  const [first, last] = [curve.counted[0]!, curve.counted.at(-1)!];
  return (
    <>
      <div class="columns charts">
        <Chart
          title="Loss"
          summary={`from ${fixed(first.loss, 3)} at step ${first.step} to ${fixed(last.loss, 3)} at step ${last.step}`}
          line={loss}
          second={held}
          ghosts={again}
          marks={marks}
          format={(value) => value.toPrecision(3)}
        />
        <Chart
          title="Tokens/s"
          summary={`${compact(rate(last) ?? 0)} at step ${last.step}`}
          line={rates}
          ghosts={ratesAgain}
          marks={marks}
          colour="second"
          fromZero
          format={compact}
        />
        {busy.slowest.x.length > 1 ? (
          <Chart
            title="Slowest rank computes"
            summary={`slowest and quickest rank of a step, ${seconds(busy.slowest.y.at(-1))} and ${seconds(busy.quickest.y.at(-1))} at step ${busy.slowest.x.at(-1)}`}
            line={busy.slowest}
            second={busy.quickest}
            isDense
            ghosts={busyAgain}
            marks={marks}
            fromZero
            format={seconds}
          />
        ) : null}
        <Ranks job={job} steps={curve.counted} />
      </div>
      <p class="legend">
        {held.x.length ? (
          <span>
            <i class="key second" /> on held-out text
          </span>
        ) : null}
        {busy.quickest.x.length > 1 ? (
          <span>
            <i class="key second" /> quickest rank
          </span>
        ) : null}
        {marks.length ? (
          <span>
            <i class="key dashed" /> an incident
          </span>
        ) : null}
        {again.length ? (
          <span>
            <i class="key ghost" /> run again after a rollback
          </span>
        ) : null}
      </p>
      <details class="figures-table">
        <summary>The last {Math.min(RECENT, curve.counted.length)} steps as a table</summary>
        <LastSteps curve={curve} />
      </details>
    </>
  );
}

function LastSteps({ curve }: { curve: Curve }) {
  return (
    <table>
      <thead>
        <tr>
          <th scope="col" class="number">Step</th>
          <th scope="col" class="number">Loss</th>
          <th scope="col" class="number">Gradient norm</th>
          <th scope="col" class="number">Time</th>
          <th scope="col" class="number">Generation</th>
        </tr>
      </thead>
      <tbody>
        {curve.counted.slice(-RECENT).reverse().map((step) => (
          <tr key={step.id}>
            <td class="number">{step.step}</td>
            <td class="number">{fixed(step.loss, 4)}</td>
            <td class="number">{fixed(step.norm, 3)}</td>
            <td class="number">{seconds(step.seconds)}</td>
            <td class="number">{step.generation}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function lineOf<T extends { step: number }>(steps: readonly T[], value: (step: T) => number | null): Line {
  return { x: steps.map((step) => step.step), y: steps.map(value) };
}

/** Seconds that the slowest and the quickest rank compute of a step, where a step tells. */
function busyOf(steps: readonly StepView[]): { slowest: Line; quickest: Line } {
  const told = steps.filter((step) => Object.keys(step.busy).length > 0);
  const of = (choose: (...spent: number[]) => number) => lineOf(told, (step) => choose(...Object.values(step.busy)));
  return { slowest: of(Math.max), quickest: of(Math.min) };
}

/** What a step says of held-out text is of the weights that the step before has left; of the last, the job says it. */
function evaluations(curve: Curve, job: JobView): Line {
  const found = curve.counted.flatMap((step) => (step.eval_loss === null || step.eval_loss === undefined ? [] : [[step.step - 1, step.eval_loss]]));
  const last = job.evaluation;
  if (last && last.loss !== null && last.step > (found.at(-1)?.[0] ?? 0)) found.push([last.step, last.loss]);
  return { x: found.map(([step]) => step!), y: found.map(([, loss]) => loss!) };
}

function marksOf(job: JobView): Mark[] {
  return job.incidents.map((incident) => ({
    x: incident.committed,
    label: plain(incident.cause),
    colour: incident.is_resize ? "resizing" : "recovering",
  }));
}

function Facts({ job }: { job: JobView }) {
  return (
    <Card title="About this job">
      <dl class="facts">
        <dt>Plan</dt>
        <dd>
          {job.plan?.summary ?? "none yet"}
          {job.plan?.reason ? <small>{job.plan.reason}</small> : null}
        </dd>
        {job.num_params ? (
          <>
            <dt>Model</dt>
            <dd>{count(job.num_params)} parameters</dd>
          </>
        ) : null}
        <dt>Size</dt>
        <dd>
          {job.size.min_devices} to {job.size.max_devices || "any number of"} devices{job.size.target ? `, ${job.size.target} wanted` : ""}
        </dd>
        <dt>Checkpoint</dt>
        <dd>{job.checkpoint ? <>step {count(job.checkpoint.step)}<small class="id">{job.checkpoint.path}</small></> : "none yet"}</dd>
        {job.spares.length ? (
          <>
            <dt>Spares</dt>
            <dd>{job.spares.map((spare) => `${spare.node} ${spare.is_ready ? "stands by" : "gets ready"}`).join(", ")}</dd>
          </>
        ) : null}
        <dt>Created</dt>
        <dd>{when(job.created_at)}</dd>
        {job.finished_at ? (
          <>
            <dt>Finished</dt>
            <dd>
              {when(job.finished_at)}, after {duration((Date.parse(job.finished_at) - Date.parse(job.created_at)) / 1000)}
            </dd>
          </>
        ) : null}
      </dl>
      <details>
        <summary>Job file, with every default written out</summary>
        <pre tabIndex={0}>{JSON.stringify(job.spec, null, 2)}</pre>
      </details>
    </Card>
  );
}

function Failure({ job }: { job: JobView }) {
  const failure = job.failure!;
  const where = [failure.rank === null ? "" : `rank ${failure.rank}`, failure.device ?? "", failure.exit_code === null ? "" : `exit code ${failure.exit_code}`];
  return (
    <section class="card failure" aria-label="Why it failed">
      <h2>{failure.message}</h2>
      <p>{where.filter(Boolean).join(", ")}</p>
      {failure.log_tail.length ? <pre tabIndex={0}>{failure.log_tail.join("\n")}</pre> : null}
    </section>
  );
}
