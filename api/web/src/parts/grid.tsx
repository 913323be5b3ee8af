// Nodes by devices on a canvas: thousands of ranks in one picture, walked with the arrow keys, told in words beside it.
//
// Cells show coordinates while there is room, and colour alone beyond that. The table below the picture has the same.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useStore } from "../live/store";
import type { Cell, Row } from "../pages/fleet";
import { colour, isDark } from "./theme";

export type Paint = (cell: Cell) => { ground: string; text: string };

interface Props {
  rows: readonly Row[];
  paint: Paint;
  chosen: string | null;
  choose: (device: string) => void;
  label: string;
}

const NAME_WIDTH = 132;
const NAME_WIDTH_NARROW = 84;
const GAP = 2;
const MANY = 64;

interface Shape {
  width: number;
  names: number;
  cell: number;
  line: number;
  perLine: number;
  linesOf: (row: Row) => number;
  /** Rows beside each other, where all of a row fits into less than half of the width. */
  columns: number;
  height: number;
}

export function Grid({ rows, paint, chosen, choose, label }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const dark = useStore(isDark);
  const shape = shapeOf(rows, width);

  useLayoutEffect(() => {
    const host = box.current;
    if (!host) return;
    const resized = new ResizeObserver(() => setWidth(host.clientWidth));
    resized.observe(host);
    return () => resized.disconnect();
  }, []);
  useEffect(() => {
    if (canvas.current && width > 0) draw(canvas.current, rows, shape, paint, chosen);
  }, [rows, width, paint, chosen, dark]);

  const cells = rows.flatMap((row) => row.cells);
  const pick = (event: MouseEvent) => {
    const at = (canvas.current as HTMLCanvasElement).getBoundingClientRect();
    const found = cellAt(rows, shape, event.clientX - at.left, event.clientY - at.top);
    if (found) choose(found.device);
  };
  const walk = (event: KeyboardEvent) => {
    const now = Math.max(0, cells.findIndex((cell) => cell.device === chosen));
    const row = rows.find((one) => one.cells.some((cell) => cell.device === cells[now]?.device));
    const step: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row?.cells.length ?? 1, ArrowUp: -(row?.cells.length ?? 1), Home: -now, End: cells.length };
    const by = step[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = cells[Math.min(cells.length - 1, Math.max(0, chosen === null ? 0 : now + by))];
    if (next) choose(next.device);
  };
  return (
    <div ref={box} class="grid">
      <canvas ref={canvas} tabIndex={0} role="img" aria-label={`${label}. Use the arrow keys to go from device to device.`} onClick={pick} onKeyDown={walk} />
    </div>
  );
}

function shapeOf(rows: readonly Row[], width: number): Shape {
  const names = width < 480 ? NAME_WIDTH_NARROW : NAME_WIDTH;
  const total = rows.reduce((sum, row) => sum + row.cells.length, 0);
  const most = Math.max(1, ...rows.map((row) => row.cells.length));
  const room = Math.max(40, width - names);
  const cell = total > 2048 ? 8 : total > MANY * 4 ? 16 : Math.min(132, Math.max(36, Math.floor(room / Math.min(most, 8))));
  const perLine = Math.max(1, Math.floor(room / cell));
  const line = total > 2048 ? 8 : total > MANY * 4 ? 18 : 52;
  const linesOf = (row: Row) => Math.max(1, Math.ceil(row.cells.length / perLine));
  const one = names + most * cell + 24;
  const columns = rows.every((row) => linesOf(row) === 1) ? Math.max(1, Math.floor((width + 24) / one)) : 1;
  const height = columns > 1 ? Math.ceil(rows.length / columns) * (line + 4) + 4 : rows.reduce((sum, row) => sum + linesOf(row) * line + 4, 4);
  return { width, names, cell, line, perLine, linesOf, columns, height };
}

function* places(rows: readonly Row[], shape: Shape): Generator<[Row, Cell | null, number, number]> {
  const perColumn = Math.ceil(rows.length / shape.columns);
  let top = 4;
  for (const [number, row] of rows.entries()) {
    if (shape.columns > 1) top = 4 + (number % perColumn) * (shape.line + 4);
    const left = shape.columns > 1 ? Math.floor(number / perColumn) * (shape.width / shape.columns) : 0;
    yield [row, null, left, top];
    for (const [place, cell] of row.cells.entries()) {
      yield [row, cell, left + shape.names + (place % shape.perLine) * shape.cell, top + Math.floor(place / shape.perLine) * shape.line];
    }
    top += shape.linesOf(row) * shape.line + 4;
  }
}

function cellAt(rows: readonly Row[], shape: Shape, x: number, y: number): Cell | null {
  for (const [, cell, left, top] of places(rows, shape)) {
    if (cell && x >= left && x < left + shape.cell && y >= top && y < top + shape.line) return cell;
  }
  return null;
}

function draw(canvas: HTMLCanvasElement, rows: readonly Row[], shape: Shape, paint: Paint, chosen: string | null): void {
  const ratio = devicePixelRatio || 1;
  canvas.width = shape.width * ratio;
  canvas.height = shape.height * ratio;
  canvas.style.height = `${shape.height}px`;
  const pen = canvas.getContext("2d") as CanvasRenderingContext2D;
  pen.scale(ratio, ratio);
  const [text, muted, focus, surface] = [colour("text"), colour("muted"), colour("focus"), colour("surface")];
  const hasWords = shape.line >= 40;
  for (const [row, cell, x, y] of places(rows, shape)) {
    if (!cell) {
      name(pen, row, shape, x, y, text, muted);
      continue;
    }
    const { ground, text: ink } = paint(cell);
    const [w, h] = [shape.cell - GAP, shape.line - GAP];
    pen.fillStyle = ground;
    round(pen, x, y, w, h, hasWords ? 5 : 1);
    pen.fill();
    if (cell.change) mark(pen, cell.change, x, y, w, h, surface, text);
    if (hasWords) words(pen, cell, x, y, w, ink);
    if (cell.device === chosen) {
      pen.strokeStyle = focus;
      pen.lineWidth = 2.5;
      round(pen, x + 1, y + 1, w - 2, h - 2, hasWords ? 5 : 1);
      pen.stroke();
    }
  }
}

function name(pen: CanvasRenderingContext2D, row: Row, shape: Shape, x: number, y: number, text: string, muted: string): void {
  if (shape.line < 16) return;
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillStyle = text;
  pen.fillText(row.node, x, y + (shape.line >= 40 ? 21 : 13), shape.names - 8);
  if (shape.line < 40) return;
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = muted;
  const extra = row.status !== "UP" ? row.status.toLowerCase() : row.scheduling !== "open" ? row.scheduling : "";
  pen.fillText(extra ? `${row.kind} · ${extra}` : row.kind, x, y + 38, shape.names - 8);
}

function words(pen: CanvasRenderingContext2D, cell: Cell, x: number, y: number, w: number, ink: string): void {
  pen.fillStyle = ink;
  const seat = cell.seat;
  if (!seat) {
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(cell.state, x + 8, y + 29, w - 12);
    return;
  }
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillText(w >= 84 ? `rank ${seat.rank}` : String(seat.rank), x + 8, y + 20, w - 12);
  pen.font = "12px system-ui, sans-serif";
  const [first, last] = seat.layers as [number, number];
  const layers = last - first === 1 ? `L${first}` : `L${first}–${last - 1}`;
  pen.fillText(w >= 84 ? `d${seat.pipeline} p${seat.stage} t${seat.tp} · ${layers}` : layers, x + 8, y + 38, w - 12);
}

/** Shapes, not colours alone: a plus for what came, a minus for what left, an arrow for what moved. */
function mark(pen: CanvasRenderingContext2D, change: NonNullable<Cell["change"]>, x: number, y: number, w: number, h: number, surface: string, text: string): void {
  const size = Math.min(8, h / 3);
  const [cx, cy] = [x + w - size - 3, y + size + 3];
  pen.fillStyle = surface;
  pen.beginPath();
  pen.arc(cx, cy, size, 0, 7);
  pen.fill();
  pen.strokeStyle = text;
  pen.lineWidth = 1.5;
  pen.beginPath();
  const arm = size * 0.55;
  pen.moveTo(cx - arm, cy);
  pen.lineTo(cx + arm, cy);
  if (change === "came") {
    pen.moveTo(cx, cy - arm);
    pen.lineTo(cx, cy + arm);
  }
  if (change === "moved") {
    pen.moveTo(cx + arm - 3, cy - 3);
    pen.lineTo(cx + arm, cy);
    pen.lineTo(cx + arm - 3, cy + 3);
  }
  pen.stroke();
}

function round(pen: CanvasRenderingContext2D, x: number, y: number, w: number, h: number, radius: number): void {
  pen.beginPath();
  pen.roundRect(x, y, w, h, radius);
}
