// Where a job trains: every device of the cluster by node, coloured by state or by speed, through every change of plan.

import { useEffect, useMemo, useState } from "preact/hooks";
import { killRank, plansOf, type JobView, type NodeView, type PlanView, type SeatView } from "../api/client";
import { useAsked } from "../asking";
import { server } from "../server";
import { link } from "../live/link";
import { useStore } from "../live/store";
import { Card, Empty, Loading } from "../parts/basics";
import { Dialog } from "../parts/dialog";
import { Grid, type Paint } from "../parts/grid";
import { colour, isDark } from "../parts/theme";
import { useRights } from "../session";
import { runs } from "../words";
import { layersOf, rowsOf, type Cell, type CellState, type Row } from "./fleet";
import { NodeDialog } from "./nodes";

const STATES: Record<CellState, { word: string; ground: string; text: string }> = {
  training: { word: "trains", ground: "cell-training", text: "cell-ink" },
  forming: { word: "is being formed", ground: "cell-forming", text: "cell-ink" },
  closing: { word: "is being closed", ground: "cell-closing", text: "cell-ink" },
  spare: { word: "stands by", ground: "cell-spare", text: "cell-ink" },
  idle: { word: "has nothing to do here", ground: "sunken", text: "muted" },
  held: { word: "is kept out", ground: "cell-held", text: "cell-ink" },
  unreachable: { word: "is silent", ground: "cell-unreachable", text: "cell-ink" },
  lost: { word: "is lost", ground: "cell-lost", text: "cell-ink" },
};
type By = "state" | "stage" | "speed";

export function MapPart({ job }: { job: JobView }) {
  const nodes = useStore(link.nodes);
  const plans = useAsked(() => plansOf(job.id), `${job.id} ${job.generation} ${job.status}`);
  const [by, setBy] = useState<By>("state");
  const [shown, setShown] = useState<number | null>(null);
  const [isCompared, setCompared] = useState(true);
  const [chosen, setChosen] = useState<string | null>(null);
  const all = useMemo(() => allPlans(plans.data, job.plan), [plans.data, job.plan]);
  const at = shown === null ? all.length - 1 : all.findIndex((plan) => plan.generation === shown);
  const plan = all[at] ?? null;
  const before = isCompared ? (all[at - 1] ?? null) : null;
  const isNow = at === all.length - 1;
  const rows = useMemo(() => rowsOf(nodes ?? [], isNow ? job : null, plan, before), [nodes, job, plan, before, isNow]);
  const paint = usePaint(by, rows);
  if (!nodes) return <Loading lines={6} />;
  if (!plan) return <Empty title="It has no plan yet." />;
  const cell = rows.flatMap((row) => row.cells).find((one) => one.device === chosen) ?? null;
  return (
    <>
      <Card
        title={`Generation ${plan.generation}: tp${plan.tp} × pp${plan.pp} × dp${plan.dp}`}
        aside={<Choices all={all} at={at} show={setShown} by={by} colourBy={setBy} isCompared={isCompared} compare={setCompared} />}
      >
        {plan.reason ? <p class="note">{plan.reason}</p> : null}
        <Grid rows={rows} paint={paint} chosen={chosen} choose={setChosen} label={`Devices of ${rows.length} nodes`} />
        <Legend rows={rows} by={by} isCompared={before !== null} />
        <p class="chosen" aria-live="polite">
          {cell ? <Chosen cell={cell} /> : "Choose a device with the mouse or the arrow keys."}
        </p>
        {cell ? <Acts job={isNow ? job : null} cell={cell} node={nodes.find((one) => one.id === cell.node) ?? null} /> : null}
      </Card>
      <Seats plan={plan} />
    </>
  );
}

function allPlans(found: readonly PlanView[] | null, current: PlanView | null): PlanView[] {
  const all = new Map((found ?? []).map((plan) => [plan.generation, plan]));
  if (current) all.set(current.generation, current);
  return [...all.values()].sort((a, b) => a.generation - b.generation);
}

interface ChoicesProps {
  all: readonly PlanView[];
  at: number;
  show: (generation: number | null) => void;
  by: By;
  colourBy: (by: By) => void;
  isCompared: boolean;
  compare: (isCompared: boolean) => void;
}

function Choices({ all, at, show, by, colourBy, isCompared, compare }: ChoicesProps) {
  return (
    <div class="choices">
      <label>
        Generation{" "}
        <select value={at === all.length - 1 ? "" : String(all[at]?.generation)} onChange={(event) => show(event.currentTarget.value ? Number(event.currentTarget.value) : null)}>
          <option value="">now</option>
          {all
            .slice(0, -1)
            .reverse()
            .map((plan) => (
              <option key={plan.generation} value={String(plan.generation)}>
                {plan.generation}: tp{plan.tp} × pp{plan.pp} × dp{plan.dp}
              </option>
            ))}
        </select>
      </label>
      <label>
        Colour{" "}
        <select value={by} onChange={(event) => colourBy(event.currentTarget.value as By)}>
          <option value="state">by state</option>
          <option value="stage">by stage</option>
          <option value="speed">by speed</option>
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={isCompared} onChange={(event) => compare(event.currentTarget.checked)} /> mark changes
      </label>
    </div>
  );
}

/** A new function whenever colours may differ, so that the picture is painted again. */
function usePaint(by: By, rows: readonly Row[]): Paint {
  const dark = useStore(isDark);
  const kinds = useStore(server)?.kinds ?? {};
  const [stages, setStages] = useState(1);
  useEffect(() => setStages(1 + Math.max(0, ...rows.flatMap((row) => row.cells.map((cell) => cell.seat?.stage ?? 0)))), [rows]);
  const speedOf = new Map(rows.map((row) => [row.node, kinds[row.kind] ?? 0]));
  const fastest = Math.max(1, ...speedOf.values());
  return useMemo<Paint>(() => {
    const state = (cell: Cell) => ({ ground: colour(STATES[cell.state].ground), text: colour(STATES[cell.state].text) });
    if (by === "state") return state;
    const share = (cell: Cell) => (by === "stage" ? (cell.seat?.stage ?? 0) / Math.max(1, stages - 1) : (speedOf.get(cell.node) ?? 0) / fastest);
    return (cell) => {
      if (cell.state === "lost" || cell.state === "held" || (by === "stage" && !cell.seat)) return state(cell);
      // From light to strong, so that it reads in grey as well.
      const strength = Math.round(18 + 70 * share(cell));
      const mixed = `color-mix(in srgb, ${colour("scale")} ${strength}%, ${colour("surface")})`;
      return { ground: mixed, text: strength > 52 ? colour("cell-ink") : colour("text") };
    };
  }, [by, dark, stages, rows, kinds]);
}

function Legend({ rows, by, isCompared }: { rows: readonly Row[]; by: By; isCompared: boolean }) {
  const found = new Set(rows.flatMap((row) => row.cells.map((cell) => cell.state)));
  return (
    <p class="legend">
      {by === "state"
        ? (Object.keys(STATES) as CellState[])
            .filter((state) => found.has(state))
            .map((state) => (
              <span key={state}>
                <i class={`key key-${state}`} /> {state}
              </span>
            ))
        : null}
      {by === "stage" ? <span>light to strong: first stage to last</span> : null}
      {by === "speed" ? <span>light to strong: by the kind's dense bf16 rate</span> : null}
      {isCompared ? <span>+ came, − left, → moved since the generation before</span> : null}
    </p>
  );
}

/** What can be done with the device that is chosen, by those who may. job: none where another generation is looked at. */
function Acts({ job, cell, node }: { job: JobView | null; cell: Cell; node: NodeView | null }) {
  const { mayEverywhere } = useRights();
  const mayKill = (useStore(server)?.chaos ?? false) && mayEverywhere("chaos");
  const [asking, setAsking] = useState<"drain" | "kill" | "rank" | null>(null);
  if (!node || node.status === "LOST") return null;
  const close = () => setAsking(null);
  const rank = job && cell.state === "training" ? cell.seat?.rank : undefined;
  return (
    <div class="actions">
      {mayEverywhere("operator") ? (
        <button type="button" class="small" onClick={() => setAsking("drain")}>
          Drain {node.id}
        </button>
      ) : null}
      {mayKill && rank !== undefined ? (
        <button type="button" class="danger small" onClick={() => setAsking("rank")}>
          Kill rank {rank}
        </button>
      ) : null}
      {mayKill ? (
        <button type="button" class="danger small" onClick={() => setAsking("kill")}>
          Kill {node.id}
        </button>
      ) : null}
      {asking === "drain" || asking === "kill" ? <NodeDialog what={asking} node={node} close={close} /> : null}
      {asking === "rank" && job && rank !== undefined ? (
        <Dialog title={`Kill rank ${rank}?`} verb="Kill it" isDangerous close={close} act={async () => (await killRank(job.id, rank)).message}>
          <p>Its process on {cell.device} is killed at once, without warning; the job recovers.</p>
        </Dialog>
      ) : null}
    </div>
  );
}

function Chosen({ cell }: { cell: Cell }) {
  const change = cell.change === "came" ? ", new here" : cell.change === "left" ? ", left with this plan" : cell.change === "moved" ? ", moved here" : "";
  return (
    <>
      <strong>{cell.device}</strong> {STATES[cell.state].word}
      {cell.seat ? `: rank ${cell.seat.rank}, pipeline ${cell.seat.pipeline} (dp), stage ${cell.seat.stage} (pp), tensor part ${cell.seat.tp} (tp), ${layersOf(cell.seat)}` : ""}
      {cell.seat?.pid ? `, process ${cell.seat.pid}` : ""}
      {change}.
    </>
  );
}

function Seats({ plan }: { plan: PlanView }) {
  const pipelines = plan.micro_batches.map((ids, index) => ({ ids, seats: plan.seats.filter((seat) => seat.pipeline === index) }));
  const depth = Math.max(...plan.seats.map((seat) => seat.stage)) + 1;
  return (
    <Card title="Pipelines">
      <div class="scroll pipelines" tabIndex={0} role="region" aria-label="Pipelines by stage">
        <table>
          <thead>
            <tr>
              <th scope="col">Pipeline</th>
              {Array.from({ length: depth }, (_, stage) => (
                <th key={stage} scope="col">
                  Stage {stage}
                </th>
              ))}
              <th scope="col">Micro-batches</th>
            </tr>
          </thead>
          <tbody>
            {pipelines.slice(0, 64).map(({ ids, seats }, index) => (
              <tr key={index}>
                <th scope="row">{index}</th>
                {Array.from({ length: depth }, (_, stage) => (
                  <td key={stage}>
                    <StageCell seats={seats.filter((seat) => seat.stage === stage)} />
                  </td>
                ))}
                <td>{runs(ids)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {pipelines.length > 64 ? <p class="note">The first 64 of {pipelines.length} pipelines.</p> : null}
    </Card>
  );
}

function StageCell({ seats }: { seats: readonly SeatView[] }) {
  const first = seats[0];
  if (!first) return <>–</>;
  return (
    <>
      <small>{layersOf(first)}</small>
      {seats.map((seat) => (
        <div key={seat.rank}>
          rank {seat.rank} <small class="inline">{seat.device}</small>
        </div>
      ))}
    </>
  );
}
