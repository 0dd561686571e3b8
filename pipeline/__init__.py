"""Corpus -> tokens -> teacher -> shards.

Stage 1 makes token rows of any text, stage 2 asks the teacher once about every token and stores
what students learn from. ``gdistill-extract`` runs both; each resumes.
"""
