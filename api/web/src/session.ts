// Who uses this page, as the server sees it: known before anything else is asked; nobody, where the page has to ask.

import { endSession, openSession, whenRefused, whoAmI, type WhoView } from "./api/client";
import { Store } from "./live/store";

/** null: not known yet. */
export const who = new Store<WhoView | "nobody" | null>(null);
/** Why a login link did not work. */
export const refusal = new Store<string>("");
const LINK = "#login=";

/** welcome: what to do before pages are shown, once somebody is signed in, by this page's address or before. */
export async function enter(welcome: () => void): Promise<void> {
  whenRefused(() => who.set("nobody"));
  if (location.hash.startsWith(LINK)) {
    const code = location.hash.slice(LINK.length);
    // Gone from the address and from the history before anything else can fail.
    history.replaceState(null, "", location.pathname + location.search);
    await openSession({ code }).catch((problem: Error) => refusal.set(problem.message));
  }
  for (;;) {
    try {
      const found = await whoAmI();
      welcome();
      return who.set(found);
    } catch {
      if (who.value === "nobody") return;
      await new Promise((later) => setTimeout(later, 1000)); // it may be starting
    }
  }
}

/** What was shown to nobody, or to somebody else, is not to be shown on. */
export async function signIn(token: string): Promise<void> {
  await openSession({ token });
  location.reload();
}

export async function signOut(): Promise<void> {
  await endSession();
  location.reload();
}
