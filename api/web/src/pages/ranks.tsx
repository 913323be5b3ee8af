// For how much of a step each rank computes: who holds up the others, and whether that changes.

import { median } from "../curve";
import type { JobView, StepView } from "../api/client";
import { Card } from "../parts/basics";
import { seconds } from "../words";

const SLOW_X = 1.2;

/** steps: those that count, in order. */
export function Ranks({ job, steps }: { job: JobView; steps: readonly StepView[] }) {
  const latest = steps.findLast((step) => Object.keys(step.busy).length > 0);
  const seats = job.plan?.seats ?? [];
  const known = latest && job.plan?.generation === latest.generation ? seats.filter((seat) => latest.busy[seat.device] !== undefined) : [];
  if (!latest || known.length === 0) return null;
  const spent = known.map((seat) => latest.busy[seat.device]!);
  const [most, usual] = [Math.max(...spent), median(spent)!];
  return (
    <Card title="Computing time by rank" aside={<span class="note">of step {latest.step}, waiting excluded</span>}>
      <div class="scroll" tabIndex={0} role="region" aria-label="Computing time by rank">
        <table class="by-rank">
          <thead>
            <tr>
              <th scope="col">Rank</th>
              <th scope="col">Device</th>
              <th scope="col" class="number">Computes</th>
              <th scope="col" class="number">Of the median</th>
              <th scope="col" class="track">
                <span class="unseen">Beside the others</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {known.map((seat, place) => (
              <tr key={seat.device} class={spent[place]! > SLOW_X * usual ? "is-slow" : ""}>
                <th scope="row">{seat.rank}</th>
                <td>
                  {seat.device}
                  <small class="inline">
                    {" "}
                    d{seat.pipeline} p{seat.stage} t{seat.tp}
                  </small>
                </td>
                <td class="number">{seconds(spent[place])}</td>
                <td class="number">{usual > 0 ? `${(spent[place]! / usual).toFixed(2)} ×` : "–"}</td>
                <td class="track" aria-hidden="true">
                  <span class="lane">
                    <i class="took" style={{ left: "0", width: `${(100 * spent[place]!) / (most || 1)}%` }} />
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {seats.length > known.length ? (
        <p class="note">
          {known.length} of {seats.length} ranks: the quickest and the slowest.
        </p>
      ) : null}
    </Card>
  );
}
