"""What the verbs share: from a request to opened parents, inputs, a judged result, files."""
