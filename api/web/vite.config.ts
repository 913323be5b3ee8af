// One page, assets named by their contents, nothing inline: the server's policy lets no other script or style run.
import { defineConfig } from "vite";

export default defineConfig({
  base: "/",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  worker: { format: "es" },
  build: { target: "es2022", outDir: "dist", assetsInlineLimit: 0, modulePreload: { polyfill: false }, sourcemap: false },
  server: { proxy: { "/api": "http://127.0.0.1:8765" } },
});
