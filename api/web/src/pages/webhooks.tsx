// URLs that are told of what happens: which there are and how they fare, and what became of each message to one of them.

import { useEffect, useState } from "preact/hooks";
import {
  createWebhook,
  deliveriesOf,
  getWebhook,
  listWebhooks,
  redeliver,
  removeWebhook,
  testWebhook,
  webhookVerb,
  type DeliveryView,
  type MadeWebhook,
  type Occasion,
  type Problem,
  type WebhookView,
} from "../api/client";
import { useAsked } from "../asking";
import { Empty, Figure, Loading, Status, Table, Trouble } from "../parts/basics";
import { Dialog } from "../parts/dialog";
import { notify } from "../parts/notices";
import { go } from "../router";
import { age, plural, seconds, when } from "../words";

const AGAIN_MS = 3000;
const SHOWN = 100;

export function WebhooksPage() {
  const found = useAsked(listWebhooks, "webhooks");
  const [isAdding, setAdding] = useState(false);
  const [made, setMade] = useState<MadeWebhook | null>(null);
  useAgain(found.again);
  useEffect(() => {
    document.title = "Webhooks · Everstep";
  }, []);
  const isOff = found.problem?.status === 409;
  return (
    <>
      <div class="heading">
        <div>
          <h1 tabIndex={-1}>Webhooks</h1>
          <p class="reason">URLs that are told of what happens to jobs and nodes, in signed messages.</p>
        </div>
        {found.problem ? null : (
          <button type="button" class="primary" onClick={() => setAdding(true)}>
            Add a webhook
          </button>
        )}
      </div>
      {found.problem ? isOff ? <Empty title={`${found.problem.message}.`} /> : <Trouble problem={found.problem} /> : null}
      {found.isLoading ? <Loading lines={4} /> : null}
      {found.data?.length === 0 ? (
        <Empty title="Nobody is told of anything.">
          <p>Add a chat, a pager or a pipeline that takes a POST over https.</p>
        </Empty>
      ) : null}
      {found.data?.length ? <Listed hooks={found.data} again={found.again} /> : null}
      {isAdding ? <AddDialog close={() => setAdding(false)} then={setMade} /> : null}
      {made ? (
        <SecretDialog
          made={made}
          close={() => {
            setMade(null);
            found.again();
          }}
        />
      ) : null}
    </>
  );
}

function Listed({ hooks, again }: { hooks: readonly WebhookView[]; again: () => void }) {
  return (
    <Table label="Webhooks" asCards head={["Webhook", "State", "Is told of", "Last delivered", "Actions"]}>
      {hooks.map((hook) => (
        <tr key={hook.id}>
          <th scope="row">
            <a href={`/webhooks/${hook.id}`}>{hook.name}</a>
            <small class="id">{hook.url}</small>
          </th>
          <td>
            <Standing hook={hook} />
          </td>
          <td data-label="is told of">
            {told(hook)}
            <small>{about(hook)}</small>
          </td>
          <td data-label="last delivered">{hook.last_delivered_at ? `${age(hook.last_delivered_at)} ago` : "never"}</td>
          <td class="whole">
            <Actions hook={hook} again={again} gone={again} />
          </td>
        </tr>
      ))}
    </Table>
  );
}

function Standing({ hook }: { hook: WebhookView }) {
  return (
    <>
      <Status word={hook.status.toUpperCase()} />
      {hook.status === "paused" && hook.why ? <small class="why">{hook.why}</small> : null}
      {hook.status !== "paused" && hook.failures ? <small class="why">{plural(hook.failures, "message")} given up in a row</small> : null}
    </>
  );
}

/** gone: what to do once it is removed. */
function Actions({ hook, again, gone }: { hook: WebhookView; again: () => void; gone: () => void }) {
  const [isRemoving, setRemoving] = useState(false);
  const isPaused = hook.status === "paused";
  const act = (what: () => Promise<unknown>, said: string) => () =>
    void what().then(
      () => {
        notify(said);
        again();
      },
      (problem: Problem) => notify(problem.message),
    );
  const remove = async () => {
    await removeWebhook(hook.id);
    gone();
    return `${hook.name} is gone`;
  };
  const turn = isPaused ? "resume" : "pause";
  const words = isPaused ? "is told again, at first what was pending" : "is told nothing until it is resumed";
  return (
    <span class="actions">
      <button type="button" class="small" aria-label={`Test ${hook.name}`} onClick={act(() => testWebhook(hook.id), `A ping to ${hook.name} is on its way`)}>
        Test
      </button>
      <button type="button" class="small" aria-label={`${isPaused ? "Resume" : "Pause"} ${hook.name}`} onClick={act(() => webhookVerb(hook.id, turn), `${hook.name} ${words}`)}>
        {isPaused ? "Resume" : "Pause"}
      </button>
      <button type="button" class="danger small" aria-label={`Remove ${hook.name}`} onClick={() => setRemoving(true)}>
        Remove
      </button>
      {isRemoving ? (
        <Dialog title={`Remove ${hook.name}?`} verb="Remove it" isDangerous close={() => setRemoving(false)} act={remove}>
          <p>It is told nothing more; its secret and the log of its messages go with it, and so does what waits to be sent.</p>
        </Dialog>
      ) : null}
    </span>
  );
}

// --- a new one -------------------------------------------------------------------------------------------------------------------

/** In words; a ping is what a test sends, and nobody asks for it. */
const OCCASIONS: Record<Exclude<Occasion, "ping">, string> = {
  "job.submitted": "it is recorded",
  "job.queued": "it waits for devices",
  "job.running": "a generation trains",
  "job.interrupted": "a fault has stopped it",
  "job.recovered": "the first step after a fault is committed",
  "job.at_risk": "one more failure could cost committed steps",
  "job.mirrored": "two copies of everything again",
  "job.rolled_back": "committed steps are run again",
  "job.straggler": "a rank has become slow",
  "job.checkpoint_failed": "a save has come to nothing",
  "job.paused": "by somebody, or to make room",
  "job.succeeded": "it has made its last step",
  "job.failed": "it has been given up",
  "job.cancelled": "somebody has ended it",
  "node.lost": "a machine is gone",
  "node.refused": "a machine has failed its check",
};

function AddDialog({ close, then }: { close: () => void; then: (made: MadeWebhook) => void }) {
  const [name, setName] = useState("");
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState<ReadonlySet<Occasion>>(new Set());
  const [projects, setProjects] = useState("");
  const [labels, setLabels] = useState("");
  const toggle = (one: Occasion) => {
    const chosen = new Set(events);
    if (!chosen.delete(one)) chosen.add(one);
    setEvents(chosen);
  };
  const act = async () => {
    then(await createWebhook({ name, url, events: [...events], projects: words(projects), labels: Object.fromEntries(words(labels).map(pair)) }));
    return "";
  };
  return (
    <Dialog title="Add a webhook" verb="Add" isWide act={act} close={close}>
      <label class="field">
        <span>Name</span>
        <input required maxLength={63} placeholder="ops" value={name} onInput={(event) => setName(event.currentTarget.value)} />
      </label>
      <label class="field">
        <span>URL</span>
        <input type="url" required maxLength={2000} placeholder="https://…" value={url} onInput={(event) => setUrl(event.currentTarget.value)} />
      </label>
      <fieldset class="occasions">
        <legend>Tell it of these; of everything, where none is chosen</legend>
        {(Object.entries(OCCASIONS) as [Occasion, string][]).map(([one, said]) => (
          <label key={one} class="check">
            <input type="checkbox" checked={events.has(one)} onChange={() => toggle(one)} />
            <span>
              {one} <small class="inline">{said}</small>
            </span>
          </label>
        ))}
      </fieldset>
      <div class="fields">
        <label class="field">
          <span>Only jobs of these projects</span>
          <input placeholder="any" value={projects} onInput={(event) => setProjects(event.currentTarget.value)} />
        </label>
        <label class="field">
          <span>Only jobs with these labels</span>
          <input placeholder="any; team=nlp, tier=prod" value={labels} onInput={(event) => setLabels(event.currentTarget.value)} />
        </label>
      </div>
    </Dialog>
  );
}

function SecretDialog({ made, close }: { made: MadeWebhook; close: () => void }) {
  const copy = () => {
    // Where the page is not served over TLS or loopback a browser has no clipboard to give.
    if (navigator.clipboard) void navigator.clipboard.writeText(made.secret).then(() => notify("The secret is copied"));
    else notify("This browser copies nothing for a page without TLS; select it by hand");
  };
  return (
    <Dialog title={`The secret of ${made.name}`} verb="It is kept" isNotice close={close} act={async () => ""}>
      <p>Its messages are signed with this, so that whoever receives them can know that they are ours. It is not shown again.</p>
      <p class="secret">
        <code>{made.secret}</code>
        <button type="button" class="small" onClick={copy}>
          Copy
        </button>
      </p>
    </Dialog>
  );
}

function words(text: string): string[] {
  return text.split(/[,\s]+/).filter(Boolean);
}

function pair(text: string): [string, string] {
  const [name = "", ...value] = text.split("=");
  return [name, value.join("=")];
}

// --- one, and what it was told ---------------------------------------------------------------------------------------------------

export function WebhookPage({ id }: { id: string }) {
  const hook = useAsked(() => getWebhook(id), id);
  const log = useAsked(() => deliveriesOf(id), id);
  const again = () => {
    hook.again();
    log.again();
  };
  useAgain(again);
  const name = hook.data?.name;
  useEffect(() => {
    document.title = `${name ?? "Webhook"} · Everstep`;
  }, [name]);
  if (!hook.data) {
    return hook.problem ? (
      <>
        <h1 tabIndex={-1}>Webhook</h1>
        <Trouble problem={hook.problem} />
        <p>
          <a href="/webhooks">All webhooks</a>
        </p>
      </>
    ) : (
      <Loading lines={6} />
    );
  }
  const known = hook.data;
  return (
    <>
      <header class="job-head">
        <div class="heading">
          <div>
            <h1 tabIndex={-1}>
              {known.name} <Status word={known.status.toUpperCase()} />
            </h1>
            <p class="id">{known.url}</p>
          </div>
          <Actions hook={known} again={again} gone={() => go("/webhooks")} />
        </div>
        {known.status === "paused" ? <p class="reason warn">Paused: {known.why}. What was pending is sent when it is resumed.</p> : null}
      </header>
      <dl class="figures">
        <Figure name="Is told of" value={known.events.length ? plural(known.events.length, "kind of event", "kinds of event") : "everything"} note={known.events.join(", ")} />
        <Figure name="Of whom" value={known.projects.length || Object.keys(known.labels).length ? "some jobs" : "all jobs"} note={about(known)} />
        <Figure name="Last delivered" value={known.last_delivered_at ? `${age(known.last_delivered_at)} ago` : "never"} />
        <Figure name="Given up in a row" value={known.failures} note={known.failures ? "too many pause it" : ""} />
        <Figure name="Made" value={`${age(known.created_at)} ago`} note={known.created_by ? `by ${known.created_by}` : ""} />
      </dl>
      {log.problem ? <Trouble problem={log.problem} /> : null}
      {log.data ? <Deliveries hook={known} deliveries={log.data} again={again} /> : <Loading lines={4} />}
    </>
  );
}

function Deliveries({ hook, deliveries, again }: { hook: WebhookView; deliveries: readonly DeliveryView[]; again: () => void }) {
  if (deliveries.length === 0) {
    return (
      <Empty title="It was told nothing yet.">
        <p>A test sends it a ping; what comes of it is shown here.</p>
      </Empty>
    );
  }
  return (
    <>
      <Table label="Messages" asCards head={["Message", "State", "#Tries", "Last answer", "Actions"]}>
        {deliveries.slice(0, SHOWN).map((one) => (
          <Message key={one.id} hook={hook} one={one} again={again} />
        ))}
      </Table>
      {deliveries.length > SHOWN ? (
        <p class="note">
          The newest {SHOWN} of {deliveries.length}; <code>everstep webhook log {hook.id}</code> has all.
        </p>
      ) : null}
    </>
  );
}

function Message({ hook, one, again }: { hook: WebhookView; one: DeliveryView; again: () => void }) {
  const last = one.attempts.at(-1);
  const verb = one.status === "pending" ? "Send now" : "Redeliver";
  const send = () =>
    void redeliver(hook.id, one.id).then(
      () => {
        notify(`${one.event} is on its way`);
        again();
      },
      (problem: Problem) => notify(problem.message),
    );
  return (
    <tr>
      <th scope="row">
        {one.event}
        <small>{when(one.at)}</small>
        <details>
          <summary>What was sent</summary>
          <small class="id">{one.id}</small>
          <pre tabIndex={0} class="body">
            {indented(one.body)}
          </pre>
          {one.attempts.length ? (
            <ol class="attempts">
              {one.attempts.map((attempt) => (
                <li key={attempt.at}>
                  {when(attempt.at)}: {attempt.code ?? "no answer"} in {seconds(attempt.seconds)}
                  {attempt.error ? `, ${attempt.error}` : ""}
                </li>
              ))}
            </ol>
          ) : null}
        </details>
      </th>
      <td>
        <Status word={one.status.toUpperCase()} />
        {one.next_try_at ? <small>{hook.status === "paused" ? "once it is resumed" : `next try ${when(one.next_try_at)}`}</small> : null}
      </td>
      <td class="number" data-label="tries">{one.tries}</td>
      <td data-label="last answer">
        {last ? last.error || last.code : "–"}
      </td>
      <td class="whole">
        <button type="button" class="small" aria-label={`${verb} ${one.event} of ${when(one.at)}`} onClick={send}>
          {verb}
        </button>
      </td>
    </tr>
  );
}

// --- words -----------------------------------------------------------------------------------------------------------------------

function told(hook: WebhookView): string {
  return hook.events.join(", ") || "everything";
}

function about(hook: WebhookView): string {
  const whose = [...hook.projects.map((project) => `project ${project}`), ...Object.entries(hook.labels).map(([name, value]) => `${name}=${value}`)];
  return whose.join(", ");
}

function indented(body: string): string {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body;
  }
}

/** Deliveries go on while one looks. */
function useAgain(again: () => void): void {
  useEffect(() => {
    const looking = setInterval(again, AGAIN_MS);
    return () => clearInterval(looking);
  });
}
