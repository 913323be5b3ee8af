// Steps and history of one job: what there is, then what happens, each entry once and in order.
//
// The tab reads up to the present by itself, has the hub tell it what comes after, and fetches what lies between where both
// have met. Listeners are told once per frame, however much comes.

import { historyOf, stepsOf, type EventView, type Problem, type StepView } from "../api/client";
import { link } from "./link";
import type { Told } from "./messages";
import { Store } from "./store";

const STEPS_AT_ONCE = 10_000;
const EVENTS_AT_ONCE = 1000;

export interface Log {
  steps: readonly StepView[];
  events: readonly EventView[];
  /** Entries are missing: the server keeps no more. */
  isCut: boolean;
  isLoading: boolean;
  problem: Problem | null;
}

export class JobLog {
  readonly store = new Store<Log>({ steps: [], events: [], isCut: false, isLoading: true, problem: null });
  private readonly steps = new Map<number, StepView>();
  private readonly events = new Map<number, EventView>();
  private isCut = false;
  private isLoading = true;
  private problem: Problem | null = null;
  private read = 0;
  private frame = 0;
  private isOver = false;
  private leave: (() => void) | null = null;

  constructor(private readonly job: string) {}

  async start(): Promise<void> {
    await this.catchUp();
    if (this.isOver) return;
    this.leave = link.watch(this.job, String(this.read), {
      watching: (from) => {
        if (Number(from) > this.read) void this.catchUp();
      },
      told: (told) => this.take(told),
    });
  }

  stop(): void {
    this.isOver = true;
    this.leave?.();
    cancelAnimationFrame(this.frame);
  }

  private async catchUp(): Promise<void> {
    try {
      const [steps, events] = await Promise.all([this.readSteps(), this.readEvents()]);
      this.read = Math.max(this.read, steps, events);
      this.problem = null;
    } catch (problem) {
      this.problem = problem as Problem;
    }
    this.isLoading = false;
    this.showSoon();
  }

  private async readSteps(): Promise<number> {
    for (let since = this.read; ; ) {
      const found = await stepsOf(this.job, since, STEPS_AT_ONCE);
      for (const step of found) this.steps.set(Number(step.id), step);
      since = Math.max(since, ...found.slice(-1).map((step) => Number(step.id)));
      if (found.length < STEPS_AT_ONCE || this.isOver) return since;
    }
  }

  private async readEvents(): Promise<number> {
    for (let since = this.read; ; ) {
      const found = await historyOf(this.job, since, EVENTS_AT_ONCE);
      for (const event of found) {
        if (event.type === "gap") this.isCut = true;
        else this.events.set(Number(event.id), event);
      }
      since = Math.max(since, ...found.slice(-1).map((event) => Number(event.id)));
      if (found.length < EVENTS_AT_ONCE || this.isOver) return since;
    }
  }

  private take(told: Told): void {
    if (told.kind === "step") this.steps.set(Number(told.data.id), told.data);
    else if (told.kind === "history") this.events.set(Number(told.data.id), told.data);
    else if (told.kind === "gap") this.isCut = true;
    this.showSoon();
  }

  private showSoon(): void {
    if (this.frame || this.isOver) return;
    const show = () => {
      this.frame = 0;
      this.store.set({ steps: inOrder(this.steps), events: inOrder(this.events), isCut: this.isCut, isLoading: this.isLoading, problem: this.problem });
    };
    // Hidden tabs have no frames, and need not be drawn often.
    this.frame = document.hidden ? (setTimeout(show, 1000) as unknown as number) : requestAnimationFrame(show);
  }
}

/** Entries come in order but for those fetched late, so this is seldom more than a copy. */
function inOrder<T>(entries: Map<number, T>): T[] {
  const ids = [...entries.keys()];
  const isSorted = ids.every((id, place) => place === 0 || (ids[place - 1] as number) < id);
  if (isSorted) return [...entries.values()];
  return [...entries].sort(([a], [b]) => a - b).map(([, entry]) => entry);
}
