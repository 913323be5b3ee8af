// What has happened to a job, newest first, and what its ranks have written.

import { useState } from "preact/hooks";
import { logOf, type JobView } from "../api/client";
import { useAsked } from "../asking";
import type { JobLog } from "../live/joblog";
import { useStore } from "../live/store";
import { Card, Empty, Loading, Trouble } from "../parts/basics";
import { clock, plain } from "../words";

const SHOWN = 200;
const TAIL = 200;

export function Events({ job, log }: { job: JobView; log: JobLog }) {
  const { events, isCut, isLoading, problem } = useStore(log.store);
  const [words, setWords] = useState("");
  const wanted = words.trim().toLowerCase();
  const found = events.filter((event) => !wanted || `${event.type} ${event.message}`.toLowerCase().includes(wanted));
  const shown = found.slice(-SHOWN).reverse();
  return (
    <>
      <Card
        title="Events"
        aside={
          <label class="search">
            <span class="unseen">Only events with these words</span>
            <input type="search" placeholder="Filter" value={words} onInput={(event) => setWords(event.currentTarget.value)} />
          </label>
        }
      >
        {problem ? <Trouble problem={problem} /> : null}
        {isLoading ? <Loading /> : null}
        {!isLoading && shown.length === 0 ? <Empty title={wanted ? "No event has these words." : "Nothing has happened yet."} /> : null}
        <ol class="events">
          {shown.map((event) => (
            <li key={event.id}>
              <time dateTime={event.at}>{clock(event.at)}</time>
              <span class={`type status-${event.status.toLowerCase()}`}>{plain(event.type)}</span>
              <span class="message">{event.message}</span>
              <small>{event.generation ? `g${event.generation} · step ${event.step}` : ""}</small>
            </li>
          ))}
        </ol>
        {found.length > SHOWN ? <p class="note">The last {SHOWN} of {found.length}.</p> : null}
        {isCut ? <p class="note">Older events are no longer kept.</p> : null}
      </Card>
      <Logs job={job} />
    </>
  );
}

function Logs({ job }: { job: JobView }) {
  const [rank, setRank] = useState("");
  const found = useAsked(() => logOf(job.id, rank ? Number(rank) : null, TAIL), `${job.id} ${rank} ${job.generation}`);
  const ranks = job.plan?.seats ?? [];
  return (
    <Card
      title="Logs"
      aside={
        <span class="actions">
          <label class="search">
            <span class="unseen">Whose log</span>
            <select value={rank} onChange={(event) => setRank(event.currentTarget.value)}>
              <option value="">the rank that failed, or the first</option>
              {ranks.map((seat) => (
                <option key={seat.rank} value={String(seat.rank)}>
                  rank {seat.rank} on {seat.device}
                </option>
              ))}
            </select>
          </label>
          <button type="button" onClick={found.again}>
            Read again
          </button>
        </span>
      }
    >
      {found.problem ? <Empty title={found.problem.message} /> : null}
      {found.isLoading ? <Loading /> : null}
      {found.data === null || found.problem ? null : (
        <pre class="log" tabIndex={0} aria-label={`The last ${TAIL} lines`}>
          {found.data || "nothing was written"}
        </pre>
      )}
    </Card>
  );
}
