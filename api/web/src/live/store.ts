// A value that components show and that changes from outside of them.

import { useEffect, useState } from "preact/hooks";

export class Store<T> {
  private readonly listeners = new Set<() => void>();

  constructor(private current: T) {}

  get value(): T {
    return this.current;
  }

  set(value: T): void {
    this.current = value;
    for (const listener of [...this.listeners]) listener();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}

export function useStore<T>(store: Store<T>): T {
  const [, redraw] = useState({});
  useEffect(() => {
    redraw({}); // it may have changed between being drawn and being listened to
    return store.subscribe(() => redraw({}));
  }, [store]);
  return store.value;
}
