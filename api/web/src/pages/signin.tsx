// Where somebody says who they are: a token, pasted. A login link needs none of this.

import { useState } from "preact/hooks";
import type { Problem } from "../api/client";
import { useStore } from "../live/store";
import { Trouble } from "../parts/basics";
import { refusal, signIn } from "../session";

export function SignInPage() {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState<Problem | null>(null);
  const [isBusy, setBusy] = useState(false);
  const link = useStore(refusal);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await signIn(token.trim());
    } catch (caught) {
      setProblem(caught as Problem);
      setBusy(false);
    }
  };
  return (
    <>
      <h1 tabIndex={-1}>Sign in</h1>
      {link ? <p role="alert">{link}</p> : null}
      <p>
        Run <code>everstep login</code> where the server runs and open the link it prints, or paste a token.
      </p>
      <form class="signin" onSubmit={submit}>
        <label class="field">
          <span>Token</span>
          <input type="password" autocomplete="off" spellcheck={false} required value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        </label>
        {problem ? <Trouble problem={problem} /> : null}
        <button type="submit" class="primary" disabled={isBusy}>
          Sign in
        </button>
      </form>
    </>
  );
}
