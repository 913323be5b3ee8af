// The loss curve of a job whose steps may be run again: which entries count, and which were rolled back.
//
// A step that is rolled back and run again is recorded twice, under two generations. The last record of each step counts; the
// earlier ones are kept and shown as what they are.

import type { StepView } from "./api/client";

export interface Curve {
  counted: readonly StepView[];
  /** Stretches of steps that were run again, each in order. */
  again: readonly (readonly StepView[])[];
}

/** steps: in the order they were recorded. */
export function curveOf(steps: readonly StepView[]): Curve {
  const counted: StepView[] = [];
  const again: StepView[][] = [];
  let below = Number.POSITIVE_INFINITY;
  let stretch: StepView[] | null = null;
  for (let place = steps.length - 1; place >= 0; place--) {
    const step = steps[place] as StepView;
    if (step.step < below) {
      below = step.step;
      counted.push(step);
      stretch = null;
    } else {
      if (!stretch || (stretch.at(-1) as StepView).generation !== step.generation) again.push((stretch = []));
      stretch.push(step);
    }
  }
  return { counted: counted.reverse(), again: again.map((one) => one.reverse()).reverse() };
}

/** Tokens per second of each step, from when it was committed; null where nobody knows how long it took. */
export function rate(step: StepView): number | null {
  return step.seconds ? step.tokens / step.seconds : null;
}

export function median(values: readonly number[]): number | null {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1] as number;
}
