// What this server is: its version, the kinds of device it knows, whether faults may be caused.

import { serverOf, type ServerView } from "./api/client";
import { Store } from "./live/store";

export const server = new Store<ServerView | null>(null);

export async function learn(): Promise<void> {
  try {
    server.set(await serverOf());
  } catch {
    setTimeout(learn, 2000); // it may be starting
  }
}
