// What a job would run as, here or on a cluster that need not be there: nothing is recorded and nothing is started.

import { useEffect, useState } from "preact/hooks";
import { forecastOf, Problem, type ForecastView } from "../api/client";
import { Card, Empty, Figure, Loading, Table, Trouble } from "../parts/basics";
import { EXAMPLE } from "./submit";
import { bytes, count, percent, plain, seconds } from "../words";

const CLUSTER = `nodes:
  - {kind: H100, count: 32, devices: 8}
  - {kind: A100, count: 32, devices: 8}
`;
const CAUSE_COLOURS = ["training", "second", "recovering", "resizing", "start", "ghost", "pending"];

export function PlansPage() {
  const [job, setJob] = useState(EXAMPLE);
  const [cluster, setCluster] = useState("");
  const [found, setFound] = useState<ForecastView | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    document.title = "Plans · Everstep";
  }, []);
  const ask = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setProblem(null);
    try {
      setFound(await forecastOf(job, cluster));
    } catch (caught) {
      setProblem(caught as Problem);
    }
    setBusy(false);
  };
  return (
    <>
      <div>
        <h1 tabIndex={-1}>Plans</h1>
        <p class="reason">What a job would run as, and how fast. Nothing is started.</p>
      </div>
      <div class="columns plan-page">
        <form class="card" onSubmit={ask}>
          <label class="field">
            <span>Job file, YAML or JSON</span>
            <textarea rows={16} spellcheck={false} value={job} onInput={(event) => setJob(event.currentTarget.value)} />
          </label>
          <label class="field">
            <span>Cluster; empty for the nodes that are up</span>
            <textarea rows={5} spellcheck={false} value={cluster} placeholder={CLUSTER} onInput={(event) => setCluster(event.currentTarget.value)} />
          </label>
          <div class="actions">
            <button type="submit" class="primary" disabled={isBusy}>
              {isBusy ? "Planning…" : "Plan"}
            </button>
            <button type="button" class="quiet" onClick={() => setCluster(CLUSTER)}>
              512 GPUs of two kinds
            </button>
          </div>
        </form>
        <div class="stack" aria-live="polite">
          {problem ? <Trouble problem={problem} /> : null}
          {isBusy ? <Loading lines={5} /> : found && !problem ? <Found found={found} /> : problem ? null : <Empty title="The plan is shown here." />}
        </div>
      </div>
      {found?.feasible && !isBusy && !problem ? <Rows found={found} /> : null}
    </>
  );
}

function Found({ found }: { found: ForecastView }) {
  if (!found.feasible) {
    return (
      <Card title={found.forever ? "No cluster could run it" : "It does not fit there"}>
        <p>{found.reason}</p>
      </Card>
    );
  }
  const causes = Object.entries(found.causes).filter(([, spent]) => spent > 0);
  const [shape, ...more] = found.shape.split(", ");
  return (
    <>
      <dl class="figures">
        <Figure name="Plan" value={shape} note={more.join(", ")} />
        <Figure name="Step" value={seconds(found.step_s)} note={`${(found.share_of_bound ?? 0) < 0.01 ? "under 1 %" : percent(found.share_of_bound, 0)} of what the devices could do`} />
        <Figure name="Devices" value={count(found.devices)} note={found.idle ? `${count(found.idle)} idle` : "none idle"} />
      </dl>
      <Card title="Where a step's time goes">
        <div class="bar" role="img" aria-label={causes.map(([cause, spent]) => `${plain(cause)} ${seconds(spent)}`).join(", ")}>
          {causes.map(([cause, spent], place) => (
            <span key={cause} class={`piece ground-${CAUSE_COLOURS[place % CAUSE_COLOURS.length]}`} style={{ flexGrow: spent / (found.step_s || 1) }} />
          ))}
        </div>
        <table class="plain">
          <tbody>
            {causes.map(([cause, spent], place) => (
              <tr key={cause}>
                <th scope="row">
                  <i class={`key ground-${CAUSE_COLOURS[place % CAUSE_COLOURS.length]}`} /> {plain(cause)}
                </th>
                <td class="number">{seconds(spent)}</td>
                <td class="number">{percent(spent / (found.step_s || 1))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Card>
      <Card title="Why, and what it survives">
        <p>{found.reason}</p>
        {found.survival ? <p>{found.survival}</p> : null}
        {found.advice.length ? (
          <ul class="advice">
            {found.advice.map((one) => (
              <li key={one}>{one}</li>
            ))}
          </ul>
        ) : null}
      </Card>
    </>
  );
}

function Rows({ found }: { found: ForecastView }) {
  return (
    <>
      <Table label="Who does what" head={["Kind", "Nodes", "#Devices", "#Used", "Work", "#Memory"]}>
        {found.rows.map((row) => (
          <tr key={row.first}>
            <th scope="row">{row.kind}</th>
            <td>
              {row.nodes === 1 ? row.first : `${row.first} … ${row.last}`}
              <small>{count(row.nodes)}</small>
            </td>
            <td class="number">{count(row.devices)}</td>
            <td class="number">{count(row.used)}</td>
            <td>
              {row.work.map((line) => (
                <div key={line}>{line}</div>
              ))}
            </td>
            <td class="number">
              {bytes(row.memory_bytes)}
              <small>of {bytes(row.memory_limit_bytes)}</small>
            </td>
          </tr>
        ))}
      </Table>
      {found.alternatives.length ? (
        <Table label="Other plans" head={["Another plan", "#Step", "Why not"]}>
          {found.alternatives.map((one) => (
            <tr key={one.shape}>
              <th scope="row">{one.shape}</th>
              <td class="number">{seconds(one.step_s)}</td>
              <td>{one.why}</td>
            </tr>
          ))}
        </Table>
      ) : null}
    </>
  );
}
