"""A world that breaks on purpose, from one seed: simulated hosts, ranks, store and supervisors around the real kernel."""
