"""Run the stages of a rank: layers, the cut into stages, messages between stages, and the actions of a step."""
