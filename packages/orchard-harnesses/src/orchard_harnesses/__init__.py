"""Agent loops: the recorder of exact token ids, `react`, `scripted`, and the `openai` policy endpoint."""
