// The small parts every page is made of: a status word, a figure, and what to show while there is nothing to show.

import type { ComponentChildren } from "preact";
import type { Problem } from "../api/client";

const MARKS: Record<string, string> = { SUCCEEDED: "✓", FAILED: "✗", CANCELLED: "■", LOST: "✗", RECOVERING: "↻", RESIZING: "⇄", PAUSED: "‖", DELIVERED: "✓" };

export function Status({ word }: { word: string }) {
  return (
    <span class={`status status-${word.toLowerCase()}`}>
      <span class="mark" aria-hidden="true">
        {MARKS[word] ?? "●"}
      </span>
      {word.toLowerCase()}
    </span>
  );
}

export function Figure({ name, value, note, title }: { name: string; value: ComponentChildren; note?: ComponentChildren; title?: string }) {
  return (
    <div class="figure" title={title}>
      <dt>{name}</dt>
      <dd>
        {value}
        {note ? <small>{note}</small> : null}
      </dd>
    </div>
  );
}

export function Card({ title, aside, children, class: extra }: { title: string; aside?: ComponentChildren; children: ComponentChildren; class?: string }) {
  return (
    <section class={`card ${extra ?? ""}`}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

export function Loading({ lines = 3 }: { lines?: number }) {
  return (
    <div class="loading" role="status" aria-label="loading">
      {Array.from({ length: lines }, (_, line) => (
        <span key={line} />
      ))}
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="title">{title}</p>
      {children}
    </div>
  );
}

export function Trouble({ problem }: { problem: Problem }) {
  return (
    <div class="trouble" role="alert">
      <p>{problem.message}</p>
      {problem.fields.length > 1 ? (
        <ul>
          {problem.fields.map((field) => (
            <li key={field.field}>{field.message}</li>
          ))}
        </ul>
      ) : null}
    </div>
  );
}

export function Progress({ done, of, word }: { done: number; of: number; word: string }) {
  return <progress class={`progress status-${word.toLowerCase()}`} value={done} max={Math.max(1, of)} aria-label={`step ${done} of ${of}`} />;
}

/** A table that scrolls inside of itself where the page is too narrow for it. */
export function Table({ label, head, children, asCards }: { label: string; head: readonly string[]; children: ComponentChildren; asCards?: boolean }) {
  return (
    <div class={asCards ? "scroll cards" : "scroll"} tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {head.map((name) => (
              <th key={name} scope="col" class={name.startsWith("#") ? "number" : ""}>
                {name.replace(/^#/, "")}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
