"""The stages at work: layers, their cut, messages between stages, and the actions of one rank."""
