// Light, dark, or what the system says; remembered by the browser.

import { Store, useStore } from "../live/store";

export type Theme = "auto" | "light" | "dark";
const ORDER: readonly Theme[] = ["auto", "light", "dark"];
const MARK: Record<Theme, string> = { auto: "◐", light: "☀", dark: "☾" };
const darkness = matchMedia("(prefers-color-scheme: dark)");

export const theme = new Store<Theme>(remembered());
/** Changes with every repaint that canvases have to follow. */
export const isDark = new Store<boolean>(false);

function remembered(): Theme {
  const found = localStorage.getItem("theme") as Theme | null;
  return found && ORDER.includes(found) ? found : "auto";
}

export function applyTheme(): void {
  const chosen = theme.value;
  const dark = chosen === "dark" || (chosen === "auto" && darkness.matches);
  document.documentElement.dataset["theme"] = dark ? "dark" : "light";
  isDark.set(dark);
}

darkness.addEventListener("change", applyTheme);
theme.subscribe(applyTheme);

export function ThemeButton() {
  const now = useStore(theme);
  const next = ORDER[(ORDER.indexOf(now) + 1) % ORDER.length] as Theme;
  const choose = () => {
    localStorage.setItem("theme", next);
    theme.set(next);
  };
  return (
    <button type="button" class="quiet icon" onClick={choose} title={`Theme: ${now}; change to ${next}`} aria-label={`Theme: ${now}. Change to ${next}`}>
      <span aria-hidden="true">{MARK[now]}</span>
    </button>
  );
}

/** A colour of the sheet, for canvases. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
