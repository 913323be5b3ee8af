// The one stream of a browser: opens it, notices when it is lost, comes back where it was, and tells every tab.
//
// Lives in a shared worker, or in the tab where there are none. Knows nothing of pages: only which jobs are watched by whom,
// how far each has been read, and the latest state of everything, for tabs that come later.

import { KINDS, type FromTab, type Kind, type LinkState, type Port, type Told } from "./messages";

const SILENT_MS = 3500; // the server pulses every other second
const GIVE_UP_MS = 6000; // a connection that says nothing so long is opened anew
const GRACE_MS = 1500; // a stream that breaks and is back within this was not lost
const TICK_MS = 500;
const FORGET_MS = 150_000; // hidden tabs may speak as rarely as once a minute
const SETTLE_MS = 60;

interface Tab {
  watched: Set<string>;
  spokeAt: number;
}

export class Hub {
  private readonly tabs = new Map<Port, Tab>();
  private readonly reached = new Map<string, string>();
  private readonly latest = new Map<string, Told>();
  private source: EventSource | null = null;
  private state: LinkState = "connecting";
  private since = Date.now();
  private heardAt = 0;
  private openedAt = 0;
  private brokenAt: number | null = null;
  private reopening: ReturnType<typeof setTimeout> | null = null;
  private ticking: ReturnType<typeof setInterval> | null = null;

  constructor(private readonly address: string) {}

  join(port: Port): void {
    this.tabs.set(port, { watched: new Set(), spokeAt: Date.now() });
    port.post({ say: "link", state: this.state, since: this.since });
    for (const told of this.latest.values()) if (told.kind !== "job") port.post({ say: "told", told });
    this.ticking ??= setInterval(() => this.tick(), TICK_MS);
    if (!this.source) this.open();
  }

  hear(port: Port, message: FromTab): void {
    const tab = this.tabs.get(port);
    if (!tab) return this.tabHasReturned(port, message);
    tab.spokeAt = Date.now();
    if (message.ask === "watch") this.watch(port, tab, message.job, message.after);
    else if (message.ask === "leave") this.leave(tab, message.job);
    else if (message.ask === "bye") this.forget(port);
  }

  private tabHasReturned(port: Port, message: FromTab): void {
    if (message.ask === "bye") return;
    this.join(port);
    this.hear(port, message);
  }

  private watch(port: Port, tab: Tab, job: string, after: string): void {
    tab.watched.add(job);
    const known = this.reached.get(job);
    if (known === undefined) {
      this.reached.set(job, after);
      this.reopenSoon();
    }
    port.post({ say: "watching", job, from: known ?? after });
    const page = this.latest.get(`job ${job}`);
    if (page) port.post({ say: "told", told: page });
  }

  private leave(tab: Tab, job: string): void {
    tab.watched.delete(job);
    this.dropUnwatched();
  }

  private forget(port: Port): void {
    this.tabs.delete(port);
    this.dropUnwatched();
    if (this.tabs.size > 0) return;
    this.source?.close();
    this.source = null;
    if (this.ticking) clearInterval(this.ticking);
    this.ticking = null;
  }

  private dropUnwatched(): void {
    const wanted = new Set([...this.tabs.values()].flatMap((tab) => [...tab.watched]));
    const left = [...this.reached.keys()].filter((job) => !wanted.has(job));
    for (const job of left) {
      this.reached.delete(job);
      this.latest.delete(`job ${job}`);
    }
    if (left.length > 0) this.reopenSoon();
  }

  // --- the stream ---------------------------------------------------------------------------------------------------------

  /** Several changes at once are one new connection. */
  private reopenSoon(afterMs = SETTLE_MS): void {
    this.reopening ??= setTimeout(() => {
      this.reopening = null;
      if (this.tabs.size > 0) this.open();
    }, afterMs);
  }

  private open(): void {
    this.source?.close();
    const places = [...this.reached].map(([job, after]) => `watch=${encodeURIComponent(`${job}:${after}`)}`);
    const source = new EventSource(places.length ? `${this.address}?${places.join("&")}` : this.address);
    this.source = source;
    this.openedAt = Date.now();
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        if (source === this.source) this.take(kind, event as MessageEvent<string>);
      });
    }
    source.addEventListener("error", () => {
      if (source !== this.source) return;
      this.brokenAt ??= Date.now();
      // Where the browser does not try again by itself, or would with places that are no longer ours.
      source.close();
      this.reopenSoon(1000);
    });
  }

  private take(kind: Kind, event: MessageEvent<string>): void {
    const told = { kind, data: JSON.parse(event.data) as unknown } as Told;
    this.heardAt = Date.now();
    this.brokenAt = null;
    if (told.kind === "history" || told.kind === "step" || told.kind === "gap") this.reached.set(told.data.job, told.data.id);
    else if (told.kind === "summary") this.latest.set(`summary ${told.data.id}`, told);
    else if (told.kind === "job") this.latest.set(`job ${told.data.id}`, told);
    else if (told.kind === "nodes") this.latest.set("nodes", told);
    this.become("live");
    const job = jobOf(told);
    for (const [port, tab] of this.tabs) if (job === null || tab.watched.has(job)) port.post({ say: "told", told });
  }

  private tick(): void {
    const now = Date.now();
    for (const [port, tab] of this.tabs) if (now - tab.spokeAt > FORGET_MS) this.forget(port);
    const silent = now - Math.max(this.heardAt, this.since);
    const isBroken = this.brokenAt !== null && now - this.brokenAt > GRACE_MS;
    if (this.state === "live" && (isBroken || silent > SILENT_MS)) this.become("stale");
    if (this.state === "connecting" && silent > SILENT_MS) this.become("stale");
    if (silent > GIVE_UP_MS && now - this.openedAt > GIVE_UP_MS) this.open();
  }

  private become(state: LinkState): void {
    if (state === this.state) return;
    this.state = state;
    this.since = state === "stale" ? this.heardAt || Date.now() : Date.now();
    for (const port of this.tabs.keys()) port.post({ say: "link", state, since: this.since });
  }
}

/** The job whose watchers alone are told; null: everybody. */
function jobOf(told: Told): string | null {
  switch (told.kind) {
    case "history":
    case "step":
    case "gap":
      return told.data.job;
    case "job":
      return told.data.id;
    default:
      return null;
  }
}
