// The machines: what each is, who trains there, and what can be done with it.

import { useEffect, useState } from "preact/hooks";
import { addNodes, drainNode, killNode, nodeVerb, removeNode, type JobSummary, type NodeView } from "../api/client";
import { link } from "../live/link";
import { useStore } from "../live/store";
import { Empty, Figure, Loading, Status, Table } from "../parts/basics";
import { Dialog } from "../parts/dialog";
import { server } from "../server";
import { useRights } from "../session";
import { clock, count, plural } from "../words";

type Asking = { what: "add" } | { what: "drain" | "remove" | "kill" | "cordon" | "uncordon" | "release"; node: NodeView };
const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

export function NodesPage() {
  const nodes = useStore(link.nodes);
  const jobs = useStore(link.summaries);
  const [asking, setAsking] = useState<Asking | null>(null);
  useEffect(() => {
    document.title = "Nodes · Everstep";
  }, []);
  const close = () => setAsking(null);
  const mayAct = useRights().mayEverywhere("operator");
  return (
    <>
      <div class="heading">
        <h1 tabIndex={-1}>Nodes</h1>
        {mayAct ? (
          <button type="button" class="primary" onClick={() => setAsking({ what: "add" })}>
            Add nodes
          </button>
        ) : null}
      </div>
      {nodes === null ? <Loading lines={6} /> : <Listed nodes={nodes} jobs={[...jobs.values()]} ask={setAsking} />}
      {asking?.what === "add" ? <AddDialog close={close} /> : null}
      {asking && asking.what !== "add" ? <NodeDialog what={asking.what} node={asking.node} close={close} /> : null}
    </>
  );
}

function Listed({ nodes, jobs, ask }: { nodes: readonly NodeView[]; jobs: readonly JobSummary[]; ask: (asking: Asking) => void }) {
  if (nodes.length === 0) {
    return (
      <Empty title="There is no node.">
        <p>
          Jobs wait until there is one. Add emulated ones here, or have machines bring themselves in with <code>everstep join</code>.
        </p>
      </Empty>
    );
  }
  const up = nodes.filter((node) => node.status === "UP");
  const byKind = new Map<string, number>();
  for (const node of up) byKind.set(node.kind, (byKind.get(node.kind) ?? 0) + node.num_devices);
  const active = jobs.filter((job) => !OVER.has(job.status)).length;
  const sorted = [...nodes].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  return (
    <>
      <dl class="figures">
        <Figure name="Nodes up" value={`${up.length} of ${nodes.length}`} />
        <Figure name="Devices up" value={count(up.reduce((sum, node) => sum + node.num_devices, 0))} note={[...byKind].map(([kind, number]) => `${number} ${kind}`).join(", ")} />
        <Figure name="Active jobs" value={active} />
      </dl>
      <Table label="Nodes" asCards head={["Node", "State", "Kind", "#Devices", "Scheduling", "Labels", "Actions"]}>
        {sorted.map((node) => (
          <Line key={node.id} node={node} ask={ask} />
        ))}
      </Table>
    </>
  );
}

function Line({ node, ask }: { node: NodeView; ask: (asking: Asking) => void }) {
  const { mayEverywhere } = useRights();
  const mayAct = mayEverywhere("operator");
  const mayKill = (useStore(server)?.chaos ?? false) && mayEverywhere("chaos");
  const isHere = node.status !== "LOST";
  const held = node.quarantine.filter((one) => one.standing !== "released");
  const button = (what: Exclude<Asking["what"], "add">, label: string, isDangerous = false) => (
    <button type="button" class={isDangerous ? "danger small" : "small"} aria-label={`${label} ${node.id}`} onClick={() => ask({ what, node })}>
      {label}
    </button>
  );
  return (
    <tr>
      <th scope="row">
        <strong>{node.id}</strong>
        <small>{node.address}</small>
      </th>
      <td>
        <Status word={node.status} />
        {node.admission === "checking" ? <small>being checked: {node.admission_reason}</small> : null}
        {node.admission === "refused" ? <small class="why">refused: {node.admission_reason}</small> : null}
        {held.map((one) => (
          <small key={one.device} class="why">
            {one.device} is kept out ({one.standing}): {one.reason}
          </small>
        ))}
      </td>
      <td data-label="kind">{node.kind}</td>
      <td class="number" data-label="devices">{node.num_devices}</td>
      <td data-label="scheduling">
        {node.scheduling}
        {node.removed ? <small>goes once it is empty{node.deadline ? `, by ${clock(node.deadline)} in any case` : ""}</small> : null}
      </td>
      <td data-label="labels">
        <small class="inline">
          {Object.entries(node.labels)
            .map(([name, value]) => `${name}=${value}`)
            .join(", ") || "–"}
        </small>
      </td>
      <td class="whole">
        <span class="actions">
          {mayAct && node.scheduling === "open" && isHere ? button("cordon", "Cordon") : null}
          {mayAct && node.scheduling !== "open" ? button("uncordon", "Uncordon") : null}
          {mayAct && isHere ? button("drain", "Drain") : null}
          {mayAct && isHere ? button("remove", "Remove") : null}
          {mayAct && (held.some((one) => one.standing === "held") || node.admission === "refused") ? button("release", "Release") : null}
          {mayKill && isHere ? button("kill", "Kill", true) : null}
        </span>
      </td>
    </tr>
  );
}

function AddDialog({ close }: { close: () => void }) {
  const kinds = Object.keys(useStore(server)?.kinds ?? {});
  const [kind, setKind] = useState("H100");
  const [devices, setDevices] = useState("2");
  const [number, setNumber] = useState("1");
  const [rack, setRack] = useState("");
  const act = async () => (await addNodes(kind, Number(devices), Number(number), rack ? { rack } : {})).message;
  return (
    <Dialog title="Add nodes" verb="Add" act={act} close={close}>
      <p>Running jobs that can use them move onto them while they train.</p>
      <label class="field">
        <span>Kind</span>
        <select value={kind} onChange={(event) => setKind(event.currentTarget.value)}>
          {kinds.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      <div class="fields">
        <label class="field">
          <span>Devices each</span>
          <input type="number" min={1} max={64} required value={devices} onInput={(event) => setDevices(event.currentTarget.value)} />
        </label>
        <label class="field">
          <span>Nodes</span>
          <input type="number" min={1} max={64} required value={number} onInput={(event) => setNumber(event.currentTarget.value)} />
        </label>
      </div>
      <label class="field">
        <span>Rack (mirrors keep out of their owner's)</span>
        <input value={rack} placeholder="none" onInput={(event) => setRack(event.currentTarget.value)} />
      </label>
    </Dialog>
  );
}

const WORDS = {
  cordon: { title: "Cordon", text: "Nothing new is placed there; what trains there trains on." },
  uncordon: { title: "Uncordon", text: "It may be used again; jobs that have not left it yet need not." },
  drain: { title: "Drain", text: "Jobs move their state off it while they train, then leave. No step is lost." },
  remove: { title: "Remove", text: "It is drained, then taken away. No step is lost." },
  release: { title: "Release", text: "You vouch for it: its devices are planned with again, and nothing is held against them." },
  kill: { title: "Kill", text: "Every process of it is killed at once, without warning. Jobs that train there recover." },
} as const;

export function NodeDialog({ what, node, close }: { what: keyof typeof WORDS; node: NodeView; close: () => void }) {
  const [deadline, setDeadline] = useState("");
  const act = async () => {
    if (what === "drain") return (await drainNode(node.id)).message;
    if (what === "remove") return (await removeNode(node.id, deadline ? Number(deadline) : null)).message;
    if (what === "kill") return (await killNode(node.id)).message;
    return (await nodeVerb(node.id, what)).message;
  };
  return (
    <Dialog title={`${WORDS[what].title} ${node.id}?`} verb={WORDS[what].title} isDangerous={what === "kill" || what === "remove"} act={act} close={close}>
      <p>
        {WORDS[what].text} It has {plural(node.num_devices, "device")} of kind {node.kind}.
      </p>
      {what === "remove" ? (
        <label class="field">
          <span>In any case after so many seconds</span>
          <input type="number" min={0} max={2592000} placeholder="only once it is empty" value={deadline} onInput={(event) => setDeadline(event.currentTarget.value)} />
        </label>
      ) : null}
    </Dialog>
  );
}
