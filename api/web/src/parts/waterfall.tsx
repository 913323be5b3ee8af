// Phases of one incident, one after another, each beside what it was expected to take. A table that is also the picture.

import type { IncidentView } from "../api/client";
import { plain, seconds } from "../words";

const ORDER = ["detect", "close", "settle", "prepare", "deliver", "fork", "form", "build", "transfer", "gather", "first_step"];
const MEANING: Record<string, string> = {
  detect: "from the fault until it was known",
  close: "every survivor stops and reports",
  settle: "what was committed is recorded",
  prepare: "hosts and seats of the next plan",
  deliver: "the way to the ranks and back",
  fork: "the new process, beside the rest",
  form: "connections of the next generation",
  build: "the model and its shards",
  transfer: "state from memory or disk",
  gather: "compute copies from their owners",
  first_step: "until a step is committed",
};

interface Phase {
  name: string;
  took: number | null;
  expected: number | null;
}

export function Waterfall({ incident }: { incident: IncidentView }) {
  const phases = phasesOf(incident);
  if (phases.length === 0) return null;
  const took = phases.reduce((sum, phase) => sum + (phase.took ?? 0), 0);
  const expected = phases.reduce((sum, phase) => sum + (phase.expected ?? 0), 0);
  const whole = Math.max(took, expected, 1e-6);
  let actualAt = 0;
  let expectedAt = 0;
  const share = (value: number) => `${(100 * value) / whole}%`;
  const hasExpected = expected > 0;
  return (
    <table class="waterfall">
      <caption class="unseen">Phases of the pause, and what was expected</caption>
      <thead>
        <tr>
          <th scope="col">Phase</th>
          <th scope="col" class="number">Took</th>
          {hasExpected ? <th scope="col" class="number">Expected</th> : null}
          <th scope="col" class="track">
            <span class="unseen">When</span>
          </th>
        </tr>
      </thead>
      <tbody>
        {phases.map((phase) => {
          const [left, faint] = [actualAt, expectedAt];
          actualAt += phase.took ?? 0;
          expectedAt += phase.expected ?? 0;
          return (
            <tr key={phase.name}>
              <th scope="row" title={MEANING[phase.name]}>
                {plain(phase.name)}
              </th>
              <td class="number">{seconds(phase.took)}</td>
              {hasExpected ? <td class="number muted">{seconds(phase.expected)}</td> : null}
              <td class="track" aria-hidden="true">
                <span class="lane">
                  {phase.expected ? <i class="expected" style={{ left: share(faint), width: share(phase.expected) }} /> : null}
                  {phase.took ? <i class="took" style={{ left: share(left), width: share(phase.took) }} /> : null}
                </span>
              </td>
            </tr>
          );
        })}
      </tbody>
      <tfoot>
        <tr>
          <th scope="row">pause, less one step</th>
          <td class="number">{incident.pause_s === null ? "under way" : seconds(incident.pause_s)}</td>
          {hasExpected ? <td class="number muted">{seconds(incident.predicted_pause_s)}</td> : null}
          <td class="track" />
        </tr>
      </tfoot>
    </table>
  );
}

function phasesOf(incident: IncidentView): Phase[] {
  const names = [...new Set([...Object.keys(incident.phases), ...Object.keys(incident.predicted)])];
  const place = (name: string) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return names
    .sort((a, b) => place(a) - place(b))
    .map((name) => ({ name, took: incident.phases[name] ?? null, expected: incident.predicted[name] ?? null }));
}
