// Each recovery and resize of a job: what was seen, what was decided and why, where the time went, and what was expected.

import { useState } from "preact/hooks";
import type { IncidentView, JobView } from "../api/client";
import { Card, Empty, Figure } from "../parts/basics";
import { Waterfall } from "../parts/waterfall";
import { count, plain, plural, seconds, when } from "../words";

const STACK_LINES = 12;

export function Incidents({ job }: { job: JobView }) {
  const all = [...job.incidents].reverse();
  if (all.length === 0) {
    return (
      <Empty title="Nothing has happened to this job.">
        <p>Recoveries and resizes are listed here, each with its evidence, its decision and where its time went.</p>
      </Empty>
    );
  }
  return (
    <>
      <Summary job={job} />
      {all.map((incident) => (
        <Incident key={incident.number} incident={incident} isNewest={incident === all[0]} />
      ))}
    </>
  );
}

function Summary({ job }: { job: JobView }) {
  const recoveries = job.incidents.filter((one) => !one.is_resize);
  const pauses = recoveries.flatMap((one) => (one.pause_s === null ? [] : [one.pause_s]));
  const lost = job.incidents.reduce((sum, one) => sum + one.rolled_back, 0);
  return (
    <dl class="figures">
      <Figure name="Recoveries" value={recoveries.length} />
      <Figure name="Resizes" value={job.incidents.length - recoveries.length} />
      <Figure name="Longest pause" value={seconds(pauses.length ? Math.max(...pauses) : null)} note="of a recovery" />
      <Figure name="All pauses" value={seconds(pauses.reduce((sum, one) => sum + one, 0))} />
      <Figure name="Steps run again" value={count(lost)} note={lost ? "" : "no committed step was lost"} />
    </dl>
  );
}

function Incident({ incident, isNewest }: { incident: IncidentView; isNewest: boolean }) {
  const isResize = incident.is_resize;
  const [isOpen, setOpen] = useState(isNewest);
  return (
    <details class={`card incident ${isResize ? "is-resize" : ""}`} open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <h2>
          {isResize ? "Resize" : "Recovery"} {incident.number}: {plain(incident.cause)}
        </h2>
        <span class="pause">{incident.pause_s === null ? "under way" : `pause ${seconds(incident.pause_s)}`}</span>
        <small>
          {when(incident.at)} · generation {incident.generation} → {incident.next_generation ?? "…"}
        </small>
      </summary>
      <dl class="facts">
        <dt>Seen</dt>
        <dd>
          {incident.message}
          {incident.devices.length ? <small>{incident.devices.join(", ")}</small> : null}
        </dd>
        <dt>Decided</dt>
        <dd>
          {incident.rung ? <strong>{plain(incident.rung)}</strong> : null}
          {incident.rung && incident.decision ? ": " : ""}
          {incident.decision || (incident.rung ? "" : "not yet")}
        </dd>
        <dt>Cost</dt>
        <dd>
          {incident.rolled_back ? `${plural(incident.rolled_back, "committed step")} run again` : "no committed step lost"}
          {incident.next_generation ? `, training goes on from step ${count(incident.committed)}` : ""}
          {incident.source ? `, state from ${incident.source}` : ""}
          {incident.moved_elements ? `, ${count(incident.moved_elements)} elements moved` : ""}
          {incident.attempts > 1 ? `, ${incident.attempts} attempts` : ""}
        </dd>
      </dl>
      <Waterfall incident={incident} />
      {incident.options.length ? <Options incident={incident} /> : null}
      {incident.stack.length ? <Stack lines={incident.stack} /> : null}
    </details>
  );
}

function Options({ incident }: { incident: IncidentView }) {
  return (
    <table class="options">
      <caption>What was weighed</caption>
      <thead>
        <tr>
          <th scope="col">Way out</th>
          <th scope="col" class="number">Price</th>
          <th scope="col" class="number">Pause</th>
          <th scope="col">Why</th>
        </tr>
      </thead>
      <tbody>
        {incident.options.map((option) => (
          <tr key={option.rung} class={option.rung === incident.rung ? "is-taken" : ""}>
            <th scope="row">
              {plain(option.rung)}
              {option.rung === incident.rung ? <small class="inline"> taken</small> : null}
            </th>
            <td class="number">{option.price_s === null ? "not possible" : seconds(option.price_s)}</td>
            <td class="number">{seconds(option.pause_s)}</td>
            <td>{option.why}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Stack({ lines }: { lines: readonly string[] }) {
  return (
    <Card title="Where the process stood that was killed for it">
      <pre tabIndex={0}>{lines.slice(0, STACK_LINES).join("\n")}</pre>
      {lines.length > STACK_LINES ? <p class="note">{lines.length - STACK_LINES} more lines</p> : null}
    </Card>
  );
}
