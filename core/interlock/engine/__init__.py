"""The loop and its four nouns: scheduler, runner, sampler, hooks."""
