"""How likely students find given text, and what the noise was when they were asked.

In: a trained student and rows of tokens, or contexts with completions. Out: validation perplexity
(exact or a bound) as a score, the likelihood of completions in one pass, block by block or as a
Monte-Carlo bound, and a student as a model of lm-evaluation-harness. A likelihood given noise that
was inferred from the very text is no likelihood of the text: it carries that caution.
"""
