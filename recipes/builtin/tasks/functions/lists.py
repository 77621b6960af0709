"""Example functions about texts, lists and dictionaries."""

# ruff: noqa: RUF007
from .example import example


@example(([3, 9, 2],), ([-4, -7],), also="return the maximum of a list")
def find_largest(numbers):
    """Find the largest number in a list."""
    largest = numbers[0]
    for number in numbers:
        if number > largest:
            largest = number
    return largest


@example(([3, 9, 2],), ([-4, -7],), also="return the minimum of a list")
def find_smallest(numbers):
    """Find the smallest number in a list."""
    smallest = numbers[0]
    for number in numbers:
        if number < smallest:
            smallest = number
    return smallest


@example(([3, 9, 2],), ([],), also="add up the numbers of a list")
def sum_list(numbers):
    """Compute the sum of a list."""
    total = 0
    for number in numbers:
        total += number
    return total


@example(([3, 9, 2],), ([5],), also="multiply the numbers of a list")
def product_of_list(numbers):
    """Compute the product of a list."""
    product = 1
    for number in numbers:
        product *= number
    return product


@example(("abc",), ("",), also="turn a string around")
def reverse_string(text):
    """Reverse a string."""
    return text[::-1]


@example(([1, 2, 3],), ([],), also="turn a list around")
def reverse_list(items):
    """Reverse a list."""
    return items[::-1]


@example(("Apple",), ("xyz",), also="return the number of vowels in a string")
def count_vowels(text):
    """Count the vowels in a string."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


@example(("Anna",), ("abc",), also="tell if a string is a palindrome")
def is_palindrome(text):
    """Check whether a string is a palindrome."""
    lowered = text.lower()
    return lowered == lowered[::-1]


@example(([1, 2, 1, 3],), ([],), also="drop repeated items from a list")
def remove_duplicates(items):
    """Remove duplicates from a list."""
    result = []
    for item in items:
        if item not in result:
            result.append(item)
    return result


@example(("a b c",), ("",), also="return the number of words in a string")
def count_words(text):
    """Count the words in a string."""
    return len(text.split())


@example(([1, 2, 3],), ([4],), also="return the mean of a list")
def average(numbers):
    """Compute the average of a list."""
    return sum(numbers) / len(numbers)


@example(([1], [2, 3]), also="join two lists")
def merge_lists(a, b):
    """Merge two lists."""
    return a + b


@example(([1, 2, 3],), also="return the squares of a list")
def square_all(numbers):
    """Square every number in a list."""
    return [number**2 for number in numbers]


@example(([1, 2, 3],), also="return a list with every number doubled")
def double_all(numbers):
    """Double every number in a list."""
    return [number * 2 for number in numbers]


@example(([1, 2, 3, 4],), also="filter the even numbers of a list")
def even_numbers(numbers):
    """Keep the even numbers of a list."""
    return [number for number in numbers if number % 2 == 0]


@example(([1, -2, 3],), also="filter the positive numbers of a list")
def positive_numbers(numbers):
    """Keep the positive numbers of a list."""
    return [number for number in numbers if number > 0]


@example(("a bbb cc",), also="return the longest word of a text")
def longest_word(text):
    """Find the longest word in a string."""
    longest = ""
    for word in text.split():
        if len(word) > len(longest):
            longest = word
    return longest


@example((["a", "b", "a"],), also="count the items of a list in a dictionary")
def count_items(items):
    """Count how often each item occurs in a list."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


@example(([1, 2, 3],), ([2, 1],), also="tell if a list is in ascending order")
def is_sorted(items):
    """Check whether a list is sorted."""
    return all(x <= y for x, y in zip(items, items[1:]))


@example(("hello big world",), also="make every word of a text start with a capital")
def capitalize_words(text):
    """Capitalize every word in a string."""
    return " ".join(word.capitalize() for word in text.split())


@example(([1, 2, 3],), also="get the last item of a list")
def last_item(items):
    """Return the last item of a list."""
    return items[-1]


@example(([1, 2, 3],), also="get the first item of a list")
def first_item(items):
    """Return the first item of a list."""
    return items[0]


@example(([4, 5, 6], 5), ([1], 2), also="return the position of an item, or -1")
def find_index(items, wanted):
    """Find the index of an item in a list."""
    for index, item in enumerate(items):
        if item == wanted:
            return index
    return -1


@example(("a b c",), also="turn the spaces of a text into underscores")
def replace_spaces(text):
    """Replace spaces with underscores."""
    return text.replace(" ", "_")


@example(("a\nb",), also="return the number of lines of a text")
def count_lines(text):
    """Count the lines of a text."""
    return len(text.split("\n"))


@example(({"a": 1},), also="turn a dictionary around")
def invert(mapping):
    """Swap the keys and values of a dictionary."""
    return {value: key for key, value in mapping.items()}


@example(([3, 1, 2],), also="sort a list by swapping neighbours")
def bubble_sort(items):
    """Sort a list with bubble sort."""
    result = list(items)
    for i in range(len(result)):
        for j in range(len(result) - 1 - i):
            if result[j] > result[j + 1]:
                result[j], result[j + 1] = result[j + 1], result[j]
    return result


@example(([[1], [2, 3]],), also="turn a list of lists into one list")
def flatten(lists):
    """Flatten a list of lists."""
    result = []
    for inner in lists:
        for item in inner:
            result.append(item)
    return result
