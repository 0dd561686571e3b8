"""The drafter: a frozen language model that proposes several tokens at once on slots of its own.

In come the model, rows, and starting points in them. Behind each starting point stand K slots,
which see the tokens before it, each other in order, and the noise of the tokens to come. Adapters
(LoRA) touch slots only, so that keys and values of the tokens stay the model's own. Out go hidden
states of the slots and the loss of what they propose.
"""
