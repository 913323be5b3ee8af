// A line over steps or time: uPlot for axes and cursor, and drawn below its line whatever does not count any more.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useStore } from "../live/store";
import { colour, isDark } from "./theme";

export interface Line {
  x: readonly number[];
  y: readonly (number | null)[];
}

/** A place on the x axis that explains what the line does there. */
export interface Mark {
  x: number;
  label: string;
  colour: string;
}

interface Props {
  title: string;
  /** In words what the picture shows, for those who do not see it. */
  summary: string;
  line: Line;
  /** Another quantity of the same unit, at some of the places, joined by a line. */
  second?: Line;
  /** Of `second`: no dot at each place, of which there are many. */
  isDense?: boolean;
  /** Drawn in grey: what was committed and run again. */
  ghosts?: readonly Line[];
  marks?: readonly Mark[];
  colour?: string;
  format: (value: number) => string;
  x?: "step" | "time";
  /** Where less than nothing is impossible and nothing is worth seeing. */
  fromZero?: boolean;
}

const HEIGHT = 220;

export function Chart(props: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const dark = useStore(isDark);

  useLayoutEffect(() => {
    const host = box.current;
    if (!host) return;
    const made = new uPlot(options(latest, host.clientWidth), dataOf(latest.current.line), host);
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: host.clientWidth, height: HEIGHT }));
    resized.observe(host);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [dark]);
  useEffect(() => plot.current?.setData(dataOf(props.line)), [props.line, props.second, props.ghosts, props.marks]);

  return (
    <figure class="chart">
      <figcaption>{props.title}</figcaption>
      <div ref={box} role="img" aria-label={`${props.title}: ${props.summary}`} />
    </figure>
  );
}

function dataOf(line: Line): uPlot.AlignedData {
  return [line.x as number[], line.y as (number | null)[]];
}

function options(latest: { current: Props }, width: number): uPlot.Options {
  const { format, x, colour: name, fromZero } = latest.current;
  const stroke = colour(name ?? "accent");
  const axis = { stroke: colour("muted"), font: "12px system-ui", grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    padding: [12, 12, 0, 0],
    scales: { x: { time: x === "time" }, y: fromZero ? { range: { min: { hard: 0, mode: 1, soft: 0 }, max: { pad: 0.1 } } } : {} },
    cursor: { points: { size: 6, fill: stroke }, drag: { x: true, y: false } },
    legend: { live: true },
    axes: [
      { ...axis, space: 64, size: 30 },
      { ...axis, size: 56, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      { label: x === "time" ? "time" : "step" },
      { label: latest.current.title, stroke, width: 1.75, value: (_, value) => (value === null ? "–" : format(value)), points: { show: false } },
    ],
    hooks: { drawClear: [(plot) => drawBelow(plot, latest.current)] },
  };
}

function drawBelow(plot: uPlot, { ghosts = [], marks = [], second, isDense }: Props): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const ratio = devicePixelRatio;
  for (const mark of marks) {
    const at = plot.valToPos(mark.x, "x", true);
    ctx.strokeStyle = colour(mark.colour);
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.lineWidth = 2 * ratio;
  const draw = (line: Line, name: string, dots = 0) => {
    ctx.strokeStyle = ctx.fillStyle = colour(name);
    const path = new Path2D();
    const places = new Path2D();
    line.x.forEach((value, place) => {
      const y = line.y[place];
      if (y === null || y === undefined) return;
      const [left, top] = [plot.valToPos(value, "x", true), plot.valToPos(y, "y", true)];
      path.lineTo(left, top);
      if (dots) {
        places.moveTo(left, top);
        places.arc(left, top, dots * ratio, 0, 2 * Math.PI);
      }
    });
    ctx.stroke(path);
    if (dots) ctx.fill(places);
  };
  for (const ghost of ghosts) draw(ghost, "ghost");
  if (second) draw(second, "second", isDense ? 0 : 3);
  ctx.restore();
}
