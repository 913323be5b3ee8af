// What the bundler makes of files that are no programs.

declare module "*.css";
