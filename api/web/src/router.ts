// Addresses of pages: what is shown is what the address says, so that every view can be linked to and gone back to.

import { Store } from "./live/store";

export interface Place {
  path: string;
  query: URLSearchParams;
}

const here = (): Place => ({ path: location.pathname.replace(/(.)\/$/, "$1"), query: new URLSearchParams(location.search) });
export const place = new Store<Place>(here());

export function start(): void {
  addEventListener("popstate", () => place.set(here()));
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const anchor = (event.target as Element | null)?.closest?.("a[href]");
    if (!(anchor instanceof HTMLAnchorElement) || anchor.origin !== location.origin || anchor.target || anchor.hash) return;
    if (anchor.pathname.startsWith("/api/") || anchor.hasAttribute("download")) return;
    event.preventDefault();
    go(anchor.pathname + anchor.search);
  });
}

export function go(address: string, replace = false): void {
  const isSamePage = new URL(address, location.origin).pathname === location.pathname;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  place.set(here());
  if (isSamePage) return;
  scrollTo(0, 0);
  // Those who do not see the page change are told by where the focus is.
  requestAnimationFrame(() => document.querySelector<HTMLElement>("main h1")?.focus({ preventScroll: true }));
}
