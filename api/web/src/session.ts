// Who uses this page, as the server sees it: known before anything else is asked; nobody, where the page has to ask.

import { endSession, openSession, whenRefused, whoAmI, type Role, type WhoView } from "./api/client";
import { Store, useStore } from "./live/store";

/** null: not known yet. */
export const who = new Store<WhoView | "nobody" | null>(null);
/** Why a login link did not work. */
export const refusal = new Store<string>("");
const LINK = "#login=";
const INCLUDES: Record<Role, readonly Role[]> = {
  viewer: ["viewer"],
  operator: ["viewer", "operator"],
  admin: ["viewer", "operator", "admin"],
  chaos: ["viewer", "chaos"],
};

/** What whoever looks may do, so that a page offers nothing that would be refused: the server decides all the same. */
export interface Rights {
  may: (role: Role) => boolean;
  /** The same for what is about the whole cluster. */
  mayEverywhere: (role: Role) => boolean;
}

export function useRights(): Rights {
  const user = useStore(who);
  const known = user === "nobody" ? null : user;
  const may = (role: Role) => known?.roles.some((own) => INCLUDES[own].includes(role)) ?? false;
  return { may, mayEverywhere: (role) => may(role) && known?.projects.length === 0 };
}

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
