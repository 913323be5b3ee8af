// One command to every open job that a list shows: first which they are, then doing it.

import { useState } from "preact/hooks";
import { toMany, type Wanted } from "../api/client";
import { useAsked } from "../asking";
import { Loading, Trouble } from "../parts/basics";
import { Dialog } from "../parts/dialog";

const NAMED = 8;
const VERBS = {
  cancel: { label: "Cancel", text: "They end where they are and keep their checkpoints." },
  pause: { label: "Pause", text: "Each makes one more step, saves it, and holds no device until it is resumed." },
  resume: { label: "Resume", text: "Those that are paused go on as soon as there are devices for them." },
} as const;
type Verb = keyof typeof VERBS;

export function ManyDialog({ wanted, close }: { wanted: Wanted; close: () => void }) {
  const [verb, setVerb] = useState<Verb>("cancel");
  const found = useAsked(() => toMany(verb, wanted, true), verb);
  const count = found.data?.count ?? 0;
  const jobs = found.data?.jobs ?? [];
  const act = async () => (await toMany(verb, wanted, false)).message;
  return (
    <Dialog title="All of these jobs" verb={`${VERBS[verb].label} ${count}`} leave="Leave them" isDangerous={verb === "cancel"} act={act} close={close}>
      <label class="field">
        <span>What is to be done</span>
        <select value={verb} onChange={(event) => setVerb(event.currentTarget.value as Verb)}>
          {(Object.keys(VERBS) as Verb[]).map((one) => (
            <option key={one} value={one}>
              {VERBS[one].label}
            </option>
          ))}
        </select>
        <small>{VERBS[verb].text}</small>
      </label>
      {found.problem ? <Trouble problem={found.problem} /> : null}
      {found.isLoading ? <Loading lines={2} /> : null}
      {found.data ? (
        <>
          <p>{found.data.message}.</p>
          <ul class="advice">
            {jobs.slice(0, NAMED).map((job) => (
              <li key={job} class="id">
                {job}
              </li>
            ))}
            {count > NAMED ? <li>and {count - NAMED} more</li> : null}
          </ul>
        </>
      ) : null}
    </Dialog>
  );
}
