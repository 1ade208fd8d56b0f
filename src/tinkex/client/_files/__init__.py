"""Files from a service.

    fetch              downloads one file: resumed, checked
    archive            unpacks a checkpoint archive without trusting it
    tokenizer_files    finds the tokenizer of a model

Private to tinkex.client.
"""
