// Where a job's time went: one bar, and the same as a table.

import type { JobView } from "../api/client";
import { Card, Empty } from "../parts/basics";
import { percent, plain, seconds } from "../words";

const COLOURS: Record<string, string> = { training: "training", start: "start", grow: "resizing", shrink: "resizing", balance: "resizing", pause: "resizing", run_again: "ghost", queue: "start", paused: "start" };
const WORDS: Record<string, string> = { training: "training", start: "until it trained", run_again: "steps run again", grow: "growing", shrink: "shrinking", queue: "put aside for others", paused: "paused" };

export function Goodput({ job }: { job: JobView }) {
  const found = job.goodput;
  if (!found || found.wall_s <= 0) {
    return (
      <Card title="Where the time went">
        <Empty title="Nothing to tell yet." />
      </Card>
    );
  }
  const causes = Object.entries(found.causes).filter(([, spent]) => spent > 0);
  return (
    <Card title="Where the time went">
      <div class="bar" role="img" aria-label={causes.map(([cause, spent]) => `${WORDS[cause] ?? plain(cause)} ${seconds(spent)}`).join(", ")}>
        {causes.map(([cause, spent]) => (
          <span key={cause} class={`piece piece-${COLOURS[cause] ?? "recovering"}`} style={{ flexGrow: spent / found.wall_s }} />
        ))}
      </div>
      <table class="plain">
        <tbody>
          {causes.map(([cause, spent]) => (
            <tr key={cause}>
              <th scope="row">
                <i class={`key piece-${COLOURS[cause] ?? "recovering"}`} /> {WORDS[cause] ?? `pauses: ${plain(cause)}`}
              </th>
              <td class="number">{seconds(spent)}</td>
              <td class="number">{percent(spent / found.wall_s)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}
