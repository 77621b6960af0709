"""One model on several processes, its ranks: tensor parallel, pipeline parallel, or both (docs/scale.md)."""
