"""Strategies for distributing a training loop. Each strategy is a subclass of `base.Strategy`."""
