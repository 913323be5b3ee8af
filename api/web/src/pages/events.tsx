// What has happened to a job, newest first, and what its ranks have written.

import { useState } from "preact/hooks";
import { linesOf, logOf, type JobView, type LogPage } from "../api/client";
import { useAsked } from "../asking";
import type { JobLog } from "../live/joblog";
import { useStore } from "../live/store";
import { Card, Empty, Loading, Trouble } from "../parts/basics";
import { clock, plain } from "../words";

const SHOWN = 200;
const TAIL = 200;
const EVERY = "every";

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
  const [words, setWords] = useState("");
  const found = useAsked(() => textOf(job, rank, words), `${job.id} ${rank} ${words} ${job.generation}`);
  const ranks = job.plan?.seats ?? [];
  return (
    <Card
      title="Logs"
      aside={
        <span class="actions">
          <label class="search">
            <span class="unseen">Only lines with these words</span>
            <input type="search" placeholder="Find" value={words} onChange={(event) => setWords(event.currentTarget.value)} />
          </label>
          <label class="search">
            <span class="unseen">Whose log</span>
            <select value={rank} onChange={(event) => setRank(event.currentTarget.value)}>
              <option value="">the rank that failed, or the first</option>
              <option value={EVERY}>every rank, by time</option>
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
          {found.data || (words ? "no line has these words" : "nothing was written")}
        </pre>
      )}
    </Card>
  );
}

/** Words are looked for in every log, unless one rank is chosen. */
async function textOf(job: JobView, rank: string, words: string): Promise<string> {
  const one = rank && rank !== EVERY ? Number(rank) : null;
  if (rank !== EVERY && !words) return logOf(job.id, one, TAIL);
  return asText(await linesOf(job.id, one, words, TAIL));
}

function asText(page: LogPage): string {
  return page.lines.map((line) => `${clock(line.at)} ${line.rank === null ? line.device : `rank ${line.rank}`} | ${line.text}`).join("\n");
}
