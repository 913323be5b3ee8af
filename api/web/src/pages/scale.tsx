// How many devices a job should have; it moves while it trains.

import { useState } from "preact/hooks";
import { resize, type JobView } from "../api/client";
import { Dialog } from "../parts/dialog";

export function ScaleDialog({ job, close }: { job: JobView; close: () => void }) {
  const [target, setTarget] = useState(String(job.size.target || job.plan?.seats.length || ""));
  const act = async () => {
    return (await resize(job.id, Number(target), revision)).message;
  };
  const [revision] = useState(job.revision); // of the job as it was when the dialog was opened
  const unit = job.plan ? job.plan.tp * job.plan.pp : 1;
  return (
    <Dialog title={`Scale ${job.name}`} verb="Scale" act={act} close={close}>
      <label class="field">
        <span>Devices</span>
        <input type="number" min={0} max={1_000_000} required value={target} onInput={(event) => setTarget(event.currentTarget.value)} />
        <small>
          0 for as many as it can use. It has {job.plan?.seats.length ?? 0} now; one pipeline of this plan takes {unit}. No step is lost.
        </small>
      </label>
    </Dialog>
  );
}
