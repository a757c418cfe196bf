"""Losses, advantage estimators, KL estimators, importance-sampling correction and how they are reduced."""
