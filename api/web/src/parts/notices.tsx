// What was just done, said once and gone after a while; and whether what is shown is still true.

import { useEffect, useState } from "preact/hooks";
import { link } from "../live/link";
import { Store, useStore } from "../live/store";
import { duration } from "../words";

const SHOWN_MS = 6000;
const notices = new Store<readonly { id: number; text: string }[]>([]);
let last = 0;

export function notify(text: string): void {
  const id = ++last;
  notices.set([...notices.value, { id, text }]);
  setTimeout(() => notices.set(notices.value.filter((one) => one.id !== id)), SHOWN_MS);
}

export function Notices() {
  return (
    <div class="notices" role="status" aria-live="polite">
      {useStore(notices).map((one) => (
        <p key={one.id}>{one.text}</p>
      ))}
    </div>
  );
}

export function StaleBanner() {
  const { state, since } = useStore(link.state);
  const [, tick] = useState(0);
  useEffect(() => {
    if (state !== "stale") return;
    const ticking = setInterval(() => tick(Date.now()), 1000);
    return () => clearInterval(ticking);
  }, [state]);
  if (state !== "stale") return null;
  return (
    <div class="stale" role="alert">
      <strong>Connection lost.</strong> What you see is {duration((Date.now() - since) / 1000)} old; training goes on without this page. Trying again.
    </div>
  );
}

const WORDS = { connecting: "connecting", live: "live", stale: "stale" } as const;

export function LinkMark() {
  const { state } = useStore(link.state);
  return (
    <span class={`link link-${state}`} title="Whether this page is told of changes as they happen">
      <span aria-hidden="true" class="dot" />
      {WORDS[state]}
    </span>
  );
}
