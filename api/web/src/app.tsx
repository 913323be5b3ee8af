// The frame of every page: where one can go, whether what is shown is true, and the page itself.

import { useStore } from "./live/store";
import { LinkMark, Notices, StaleBanner } from "./parts/notices";
import { ThemeButton } from "./parts/theme";
import { JobPage } from "./pages/job";
import { FaultsPage } from "./pages/faults";
import { JobsPage } from "./pages/jobs";
import { NodesPage } from "./pages/nodes";
import { PlansPage } from "./pages/plans";
import { SignInPage } from "./pages/signin";
import { WebhookPage, WebhooksPage } from "./pages/webhooks";
import { place } from "./router";
import { server } from "./server";
import { signOut, useRights, who } from "./session";

export function App() {
  const { path } = useStore(place);
  const known = useStore(server);
  const user = useStore(who);
  const { may, mayEverywhere } = useRights();
  return (
    <>
      <a class="skip" href="#main">
        Skip to the page
      </a>
      <header class="bar-top">
        <a class="brand" href="/">
          <Mark /> Everstep
        </a>
        <nav aria-label="Pages">
          <Tab href="/jobs" isHere={path === "/" || path.startsWith("/jobs")} label="Jobs" />
          <Tab href="/nodes" isHere={path === "/nodes"} label="Nodes" />
          <Tab href="/plans" isHere={path === "/plans"} label="Plans" />
          {may("admin") ? <Tab href="/webhooks" isHere={path.startsWith("/webhooks")} label="Webhooks" /> : null}
          {known?.chaos && mayEverywhere("chaos") ? <Tab href="/faults" isHere={path === "/faults"} label="Faults" /> : null}
        </nav>
        <span class="spring" />
        <LinkMark />
        <ThemeButton />
      </header>
      <StaleBanner />
      <main id="main">{user === "nobody" ? <SignInPage /> : user ? pageOf(path) : null}</main>
      <footer class="foot">
        Everstep {known?.version ?? ""}
        {user && user !== "nobody" && user.is_session ? <SignedIn name={user.name} /> : null}
      </footer>
      <Notices />
    </>
  );
}

function SignedIn({ name }: { name: string }) {
  return (
    <>
      {" · "}
      {name}{" "}
      <button type="button" class="quiet small" onClick={() => void signOut()}>
        Sign out
      </button>
    </>
  );
}

function Tab({ href, isHere, label }: { href: string; isHere: boolean; label: string }) {
  return (
    <a href={href} aria-current={isHere ? "page" : undefined}>
      {label}
    </a>
  );
}

function Mark() {
  return (
    <svg viewBox="0 0 32 32" width="22" height="22" aria-hidden="true">
      <rect width="32" height="32" rx="7" class="mark-ground" />
      <path d="M6 24h6v-5h6v-5h6V8" class="mark-steps" />
    </svg>
  );
}

function pageOf(path: string) {
  const [, first, id, part = ""] = path.split("/");
  if (path === "/" || path === "/jobs") return <JobsPage />;
  if (first === "jobs" && id) return <JobPage key={id} id={decodeURIComponent(id)} part={part} />;
  if (path === "/nodes") return <NodesPage />;
  if (path === "/webhooks") return <WebhooksPage />;
  if (first === "webhooks" && id) return <WebhookPage key={id} id={decodeURIComponent(id)} />;
  if (path === "/plans") return <PlansPage />;
  if (path === "/faults") return <FaultsPage />;
  return <Lost />;
}

function Lost() {
  return (
    <>
      <h1 tabIndex={-1}>There is no such page</h1>
      <p>
        <a href="/jobs">All jobs</a>
      </p>
    </>
  );
}
