// Something asked of the API when a component appears, and again when told to.

import { useCallback, useEffect, useState } from "preact/hooks";
import { Problem } from "./api/client";

export interface Asked<T> {
  data: T | null;
  problem: Problem | null;
  isLoading: boolean;
  again: () => void;
}

/** key: what it depends on; an older answer never replaces a newer one. */
export function useAsked<T>(ask: () => Promise<T>, key: string): Asked<T> {
  const [found, setFound] = useState<{ key: string; data: T | null; problem: Problem | null } | null>(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let isCurrent = true;
    const take = (data: T | null, problem: Problem | null) => {
      if (isCurrent) setFound((before) => ({ key, data: data ?? (before?.key === key ? before.data : null), problem }));
    };
    ask().then(
      (data) => take(data, null),
      (error: unknown) => take(null, error instanceof Problem ? error : new Problem(String(error), 0)),
    );
    return () => {
      isCurrent = false;
    };
  }, [key, turn]);
  const current = found?.key === key ? found : null;
  const again = useCallback(() => setTurn((before) => before + 1), []);
  return { data: current?.data ?? null, problem: current?.problem ?? null, isLoading: current === null, again };
}
