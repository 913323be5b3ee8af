// A modal question: a native dialog, so that Escape, focus and what lies behind are the browser's business.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Problem } from "../api/client";
import { notify } from "./notices";
import { Trouble } from "./basics";

interface Props {
  title: string;
  /** What the button that does it says. */
  verb: string;
  isDangerous?: boolean;
  isWide?: boolean;
  /** What the button that leaves everything as it is says, where "Cancel" could be taken for something else. */
  leave?: string;
  /** There is nothing to decide: one button. */
  isNotice?: boolean;
  children: ComponentChildren;
  /** What to say when it is done, "" for nothing. Its Problem is shown, and the dialog stays. */
  act: () => Promise<string>;
  close: () => void;
}

export function Dialog({ title, verb, isDangerous, isWide, leave, isNotice, children, act, close }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const said = await act();
      if (said) notify(said);
      dialog.current?.close();
    } catch (caught) {
      setProblem(caught as Problem);
    }
    setBusy(false);
  };
  return (
    <dialog ref={dialog} class={isWide ? "wide" : ""} onClose={close} aria-labelledby="dialog-title">
      <form onSubmit={submit}>
        <h2 id="dialog-title">{title}</h2>
        {children}
        {problem ? <Trouble problem={problem} /> : null}
        <footer>
          {isNotice ? null : (
            <button type="button" class="quiet" onClick={() => dialog.current?.close()}>
              {leave ?? "Cancel"}
            </button>
          )}
          <button type="submit" class={isDangerous ? "danger" : "primary"} disabled={isBusy}>
            {verb}
          </button>
        </footer>
      </form>
    </dialog>
  );
}
