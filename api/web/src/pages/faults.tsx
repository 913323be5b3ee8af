// Faults on purpose, where the server allows them: cause one, and see what became of those of a job.

import { useEffect, useState } from "preact/hooks";
import { causeFault, faultsOf, Problem, type FaultView, type JobSummary } from "../api/client";
import { useAsked } from "../asking";
import { link } from "../live/link";
import { useStore } from "../live/store";
import { Card, Empty, Loading, Table, Trouble } from "../parts/basics";
import { notify } from "../parts/notices";
import { server } from "../server";
import { useRights } from "../session";
import { clock, plain, seconds } from "../words";

const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const NUMBERS = new Set(["rank", "pipeline", "stage", "tp", "step", "duration_s", "factor", "jump_s", "exit_code", "seed"]);
const ORDER = ["node", "rank", "device", "pipeline", "stage", "tp", "at", "step", "duration_s", "factor", "jump_s", "exit_code", "seed"];
const HINTS: Record<string, string> = {
  rank: "by the seed",
  node: "by the seed",
  device: "node/index",
  duration_s: "seconds",
  factor: "times, or bytes/s",
  step: "at once",
  seed: "0",
};
const AGAIN_MS = 2000;

export function FaultsPage() {
  const known = useStore(server);
  const jobs = [...useStore(link.summaries).values()].sort((a, b) => (a.id < b.id ? 1 : -1));
  const [chosen, setChosen] = useState("");
  useEffect(() => {
    document.title = "Faults · Everstep";
  }, []);
  const mayCause = useRights().mayEverywhere("chaos");
  if (known && !known.chaos) return <NotAllowed />;
  const job = chosen || (jobs.find((one) => !OVER.has(one.status)) ?? jobs[0])?.id || "";
  return (
    <>
      <div>
        <h1 tabIndex={-1}>Faults</h1>
        <p class="reason">Make something fail, to see what becomes of it. Each fault is judged: recovered, harmless, or not.</p>
      </div>
      <label class="field narrow">
        <span>Job</span>
        <select value={job} onChange={(event) => setChosen(event.currentTarget.value)}>
          {jobs.length === 0 ? <option value="">no job</option> : null}
          {jobs.map((one) => (
            <option key={one.id} value={one.id}>
              {one.name}, {one.status.toLowerCase()} ({one.id})
            </option>
          ))}
        </select>
      </label>
      {mayCause ? <Cause job={jobs.find((one) => one.id === job) ?? null} /> : null}
      {job ? <Caused key={job} job={job} /> : null}
    </>
  );
}

function NotAllowed() {
  return (
    <>
      <h1 tabIndex={-1}>Faults</h1>
      <Empty title="This server allows no faults on purpose.">
        <p>
          Start it with <code>everstep up --chaos</code> to make ranks, nodes and links fail from here.
        </p>
      </Empty>
    </>
  );
}

function Cause({ job }: { job: JobSummary | null }) {
  const known = useStore(server);
  const [kind, setKind] = useState("kill");
  const [fields, setFields] = useState<Record<string, string>>({});
  const [problem, setProblem] = useState<Problem | null>(null);
  const about = known?.fault_kinds.find((one) => one.kind === kind);
  const names = [...(about?.needs ?? []), ...(about?.takes ?? [])].filter((name) => ORDER.includes(name)).sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const act = async (event: Event) => {
    event.preventDefault();
    setProblem(null);
    try {
      notify((await causeFault(requestOf(kind, job?.id ?? null, names, fields))).message);
    } catch (caught) {
      setProblem(caught as Problem);
    }
  };
  return (
    <form class="card" onSubmit={act}>
      <label class="field">
        <span>Kind</span>
        <select value={kind} onChange={(event) => setKind(event.currentTarget.value)}>
          {known?.fault_kinds.map((one) => (
            <option key={one.kind} value={one.kind}>
              {plain(one.kind)}: {one.words}
            </option>
          ))}
        </select>
      </label>
      <div class="fields">
        {names.map((name) => (
          <label key={name} class="field">
            <span>{plain(name.replace(/_s$/, ", seconds"))}</span>
            {name === "at" ? (
              <select value={fields["at"] ?? ""} onChange={(event) => setFields({ ...fields, at: event.currentTarget.value })}>
                <option value="">at once</option>
                {known?.points.map((point) => (
                  <option key={point} value={point}>
                    {plain(point)}
                  </option>
                ))}
              </select>
            ) : (
              <input
                inputMode={NUMBERS.has(name) ? "decimal" : "text"}
                placeholder={HINTS[name] ?? "any"}
                required={about?.needs.includes(name) ?? false}
                value={fields[name] ?? ""}
                onInput={(event) => setFields({ ...fields, [name]: event.currentTarget.value })}
              />
            )}
          </label>
        ))}
      </div>
      {problem ? <Trouble problem={problem} /> : null}
      <div class="actions">
        <button type="submit" class="danger" disabled={job !== null && OVER.has(job.status)}>
          Cause it
        </button>
        {job && OVER.has(job.status) ? <span class="note">This job is over.</span> : null}
      </div>
    </form>
  );
}

function requestOf(kind: string, job: string | null, names: readonly string[], fields: Readonly<Record<string, string>>): Record<string, unknown> {
  const given = names.filter((name) => fields[name]).map((name) => [name, NUMBERS.has(name) ? Number(fields[name]) : fields[name]]);
  return { kind, ...(job ? { job } : {}), ...Object.fromEntries(given) };
}

function Caused({ job }: { job: string }) {
  const found = useAsked(() => faultsOf(job), job);
  const isOpen = found.data?.some((one) => one.verdict === "open") ?? false;
  const recoveries = useStore(link.summaries).get(job);
  useEffect(found.again, [recoveries?.recoveries, recoveries?.status]);
  useEffect(() => {
    const again = setInterval(found.again, isOpen ? AGAIN_MS : 2 * AGAIN_MS);
    return () => clearInterval(again);
  }, [isOpen]);
  if (found.problem) return <Trouble problem={found.problem} />;
  if (!found.data) return <Loading />;
  return (
    <Card title="What became of them">
      {found.data.length === 0 ? <Empty title="Nothing has been done to this job on purpose." /> : <Verdicts faults={[...found.data].reverse()} />}
    </Card>
  );
}

const GOOD = new Set(["recovered", "harmless"]);

function Verdicts({ faults }: { faults: readonly FaultView[] }) {
  return (
    <Table label="Faults and verdicts" head={["Fault", "Asked", "#Step", "Verdict", "#Seen after", "#Pause", "Why"]}>
      {faults.map((one) => (
        <tr key={one.id}>
          <th scope="row">
            {plain(one.kind)}
            <small>{[one.node, ...one.devices].filter(Boolean).join(", ") || one.at}</small>
          </th>
          <td>{clock(one.asked_at)}</td>
          <td class="number">{one.step || "–"}</td>
          <td>
            <span class={`status status-${one.verdict === "open" ? "pending" : GOOD.has(one.verdict) ? "running" : "failed"}`}>{plain(one.verdict)}</span>
          </td>
          <td class="number">{seconds(one.detected_s)}</td>
          <td class="number">{seconds(one.pause_s)}</td>
          <td>{one.why || one.message}</td>
        </tr>
      ))}
    </Table>
  );
}
