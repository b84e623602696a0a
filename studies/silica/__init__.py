"""Silica: fine-tuning a released potential."""
