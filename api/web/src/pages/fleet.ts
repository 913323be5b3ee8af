// Who sits where: a plan and the nodes of the cluster as one grid of devices, and what changed between two of them.

import type { JobView, NodeView, PlanView, SeatView } from "../api/client";

/** One accelerator: a row's node, its place there, and the rank on it, if any. */
export interface Cell {
  device: string;
  node: string;
  index: number;
  seat: SeatView | null;
  state: CellState;
  /** Against the plan before: came, left, or moved to another place in the mathematics. */
  change: "came" | "left" | "moved" | null;
}

export type CellState = "training" | "forming" | "closing" | "idle" | "spare" | "unreachable" | "lost" | "held";

export interface Row {
  node: string;
  kind: string;
  status: string;
  scheduling: string;
  cells: readonly Cell[];
}

export function rowsOf(nodes: readonly NodeView[], job: JobView | null, plan: PlanView | null, before: PlanView | null): Row[] {
  const seats = new Map(plan?.seats.map((seat) => [seat.device, seat]));
  const earlier = new Map(before?.seats.map((seat) => [seat.device, seat]));
  const rows = nodes.map((node) => rowOf(node, job, seats, earlier, before !== null));
  const known = new Set(nodes.map((node) => node.id));
  const gone = new Set([...seats.keys(), ...earlier.keys()].map(nodeOf).filter((node) => !known.has(node)));
  for (const node of gone) rows.push(rowOf(lostNode(node, [...seats.keys(), ...earlier.keys()]), job, seats, earlier, before !== null));
  return rows.sort((a, b) => a.node.localeCompare(b.node, "en", { numeric: true }));
}

type Seats = ReadonlyMap<string, SeatView>;

function rowOf(node: NodeView, job: JobView | null, seats: Seats, earlier: Seats, isCompared: boolean): Row {
  const held = new Set(node.quarantine.filter((one) => one.standing !== "released").map((one) => one.device));
  const isSpare = job?.spares.some((spare) => spare.node === node.id) ?? false;
  const cells = Array.from({ length: node.num_devices }, (_, index): Cell => {
    const device = `${node.id}/${index}`;
    const seat = seats.get(device) ?? null;
    const state = stateOf(node, job, seat, held.has(device), isSpare);
    return { device, node: node.id, index, seat, state, change: isCompared ? changeOf(earlier.get(device) ?? null, seat) : null };
  });
  return { node: node.id, kind: node.kind, status: node.status, scheduling: node.scheduling, cells };
}

function stateOf(node: NodeView, job: JobView | null, seat: SeatView | null, isHeld: boolean, isSpare: boolean): CellState {
  if (node.status === "LOST") return "lost";
  if (isHeld) return "held";
  if (node.status === "UNREACHABLE") return "unreachable";
  if (!seat) return isSpare ? "spare" : "idle";
  if (job === null || job.status === "RUNNING") return "training";
  if (job.status === "STOPPING") return "closing";
  return job.status === "RECOVERING" || job.status === "RESIZING" || job.status === "STARTING" ? "forming" : "idle";
}

function changeOf(before: SeatView | null, now: SeatView | null): Cell["change"] {
  if (!before && !now) return null;
  if (!before) return "came";
  if (!now) return "left";
  const isSame = before.stage === now.stage && before.tp === now.tp && before.layers[0] === now.layers[0] && before.layers[1] === now.layers[1];
  return isSame && before.pipeline === now.pipeline ? null : "moved";
}

function lostNode(id: string, devices: readonly string[]): NodeView {
  const most = Math.max(...devices.filter((device) => nodeOf(device) === id).map((device) => Number(device.slice(device.lastIndexOf("/") + 1))));
  return {
    id,
    kind: "gone",
    num_devices: most + 1,
    status: "LOST",
    address: "",
    labels: {},
    quarantine: [],
    admission: "unchecked",
    admission_reason: "",
    checked: "",
    scheduling: "open",
    removed: false,
    deadline: null,
  };
}

export function nodeOf(device: string): string {
  return device.slice(0, device.lastIndexOf("/"));
}

/** `layers 0–2`. */
export function layersOf(seat: SeatView): string {
  const [first, last] = seat.layers as [number, number];
  return last - first === 1 ? `layer ${first}` : `layers ${first}–${last - 1}`;
}
