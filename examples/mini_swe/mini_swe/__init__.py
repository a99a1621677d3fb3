"""A SWE-style task that makes its own small repositories: a bug each, an issue that tells the symptom, a shell to mend it."""
