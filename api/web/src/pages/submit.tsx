// A job file, pasted, chosen from the disk or begun from an example; what is wrong with it is said field by field.

import { useRef, useState } from "preact/hooks";
import { newKey, submit } from "../api/client";
import { Dialog } from "../parts/dialog";

export const EXAMPLE = `# A byte-level language model of 0.2 M parameters on the Python standard library's own sources.
name: byte-gpt
program: causal_lm
data:
  files: ["{stdlib}/*.py"]
  max_bytes: 2000000
model: {layers: 4, width: 64, heads: 4, kv_heads: 2, ffn: 160, dropout: 0.05}
train:
  steps: 160
  micro_batches: 4
  micro_batch_size: 4
  sequence: 128
  seed: 1
  learning_rate: 3.0e-3
  min_learning_rate: 3.0e-4
  warmup_steps: 20
parallel: {tp: 2, pp: 2}
checkpoint: {every: 25}
`;

export function SubmitDialog({ close, then }: { close: () => void; then: (job: string) => void }) {
  const [text, setText] = useState(EXAMPLE);
  // The same for every try of this text, so that a lost answer makes no second job.
  const key = useRef({ text: "", value: "" });
  const act = async () => {
    if (key.current.text !== text) key.current = { text, value: newKey() };
    const job = await submit(text, key.current.value);
    then(job.id);
    return `${job.name} is submitted as ${job.id}`;
  };
  const choose = async (event: Event) => {
    const file = (event.currentTarget as HTMLInputElement).files?.[0];
    if (file) setText(await file.text());
  };
  return (
    <Dialog title="Submit a job" verb="Submit" isWide act={act} close={close}>
      <label class="field">
        <span>Job file, YAML or JSON</span>
        <textarea rows={18} spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </label>
      <label class="field">
        <span>or choose one</span>
        <input type="file" accept=".yaml,.yml,.json" onChange={choose} />
      </label>
    </Dialog>
  );
}
