"""Python functions: descriptions, bodies, and the arguments that they are checked with."""

# description (alternatives after |) ; name ; arguments ; body ; test arguments, a list of tuples
_TABLE = r"""
add two numbers|return the sum of two numbers ; add ; a, b ; return {0} + {1} ; [(1, 2), (7, -3)]
subtract one number from another|return the difference of two numbers ; subtract ; a, b ; return {0} - {1} ; [(5, 2), (7, -3)]
multiply two numbers|return the product of two numbers ; multiply ; a, b ; return {0} * {1} ; [(3, 2), (7, -3)]
return the larger of two numbers|find the larger of two numbers ; larger ; a, b ; return {0} if {0} > {1} else {1} ; [(1, 2), (9, 4)]
return the smaller of two numbers|find the smaller of two numbers ; smaller ; a, b ; return {0} if {0} < {1} else {1} ; [(1, 2), (9, 4)]
find the largest number in a list|return the maximum of a list ; find_largest ; numbers ; largest = {0}[0]~for number in {0}:~    if number > largest:~        largest = number~return largest ; [([3, 9, 2],), ([-4, -7],)]
find the smallest number in a list|return the minimum of a list ; find_smallest ; numbers ; smallest = {0}[0]~for number in {0}:~    if number < smallest:~        smallest = number~return smallest ; [([3, 9, 2],), ([-4, -7],)]
compute the sum of a list|add up the numbers of a list ; sum_list ; numbers ; total = 0~for number in {0}:~    total += number~return total ; [([3, 9, 2],), ([],)]
compute the product of a list|multiply the numbers of a list ; product_of_list ; numbers ; product = 1~for number in {0}:~    product *= number~return product ; [([3, 9, 2],), ([5],)]
reverse a string|turn a string around ; reverse_string ; text ; return {0}[::-1] ; [("abc",), ("",)]
reverse a list|turn a list around ; reverse_list ; items ; return {0}[::-1] ; [([1, 2, 3],), ([],)]
check whether a number is even|tell if a number is even ; is_even ; number ; return {0} % 2 == 0 ; [(4,), (7,)]
check whether a number is odd|tell if a number is odd ; is_odd ; number ; return {0} % 2 == 1 ; [(4,), (7,)]
check whether a number is positive|tell if a number is positive ; is_positive ; number ; return {0} > 0 ; [(1,), (-7,), (0,)]
check whether a number is prime|tell if a number is prime ; is_prime ; number ; if {0} < 2:~    return False~for i in range(2, int({0} ** 0.5) + 1):~    if {0} % i == 0:~        return False~return True ; [(1,), (7,), (9,), (2,)]
compute the factorial of a number|return the factorial of a number ; factorial ; n ; result = 1~for i in range(2, {0} + 1):~    result *= i~return result ; [(5,), (0,), (1,)]
count the vowels in a string|return the number of vowels in a string ; count_vowels ; text ; count = 0~for letter in {0}.lower():~    if letter in "aeiou":~        count += 1~return count ; [("Apple",), ("xyz",)]
check whether a string is a palindrome|tell if a string is a palindrome ; is_palindrome ; text ; lowered = {0}.lower()~return lowered == lowered[::-1] ; [("Anna",), ("abc",)]
remove duplicates from a list|drop repeated items from a list ; remove_duplicates ; items ; result = []~for item in {0}:~    if item not in result:~        result.append(item)~return result ; [([1, 2, 1, 3],), ([],)]
count the words in a string|return the number of words in a string ; count_words ; text ; return len({0}.split()) ; [("a b c",), ("",)]
compute the average of a list|return the mean of a list ; average ; numbers ; return sum({0}) / len({0}) ; [([1, 2, 3],), ([4],)]
convert Celsius to Fahrenheit|turn degrees Celsius into Fahrenheit ; celsius_to_fahrenheit ; celsius ; return {0} * 9 / 5 + 32 ; [(100,), (0,)]
convert Fahrenheit to Celsius|turn degrees Fahrenheit into Celsius ; fahrenheit_to_celsius ; fahrenheit ; return ({0} - 32) * 5 / 9 ; [(212,), (32,)]
return the first n Fibonacci numbers|list the first n Fibonacci numbers ; fibonacci ; n ; numbers = [0, 1]~while len(numbers) < {0}:~    numbers.append(numbers[-1] + numbers[-2])~return numbers[:{0}] ; [(7,), (1,)]
merge two lists|join two lists ; merge_lists ; a, b ; return {0} + {1} ; [([1], [2, 3])]
square every number in a list|return the squares of a list ; square_all ; numbers ; return [number ** 2 for number in {0}] ; [([1, 2, 3],)]
double every number in a list|return a list with every number doubled ; double_all ; numbers ; return [number * 2 for number in {0}] ; [([1, 2, 3],)]
keep the even numbers of a list|filter the even numbers of a list ; even_numbers ; numbers ; return [number for number in {0} if number % 2 == 0] ; [([1, 2, 3, 4],)]
keep the positive numbers of a list|filter the positive numbers of a list ; positive_numbers ; numbers ; return [number for number in {0} if number > 0] ; [([1, -2, 3],)]
find the longest word in a string|return the longest word of a text ; longest_word ; text ; longest = ""~for word in {0}.split():~    if len(word) > len(longest):~        longest = word~return longest ; [("a bbb cc",)]
count how often each item occurs in a list|count the items of a list in a dictionary ; count_items ; items ; counts = {{}}~for item in {0}:~    counts[item] = counts.get(item, 0) + 1~return counts ; [(["a", "b", "a"],)]
compute the power of a number|raise a number to a power ; power ; base, exponent ; return {0} ** {1} ; [(2, 5), (3, 0)]
compute the area of a rectangle|return the area of a rectangle ; rectangle_area ; width, height ; return {0} * {1} ; [(3, 4)]
compute the perimeter of a rectangle|return the perimeter of a rectangle ; perimeter ; width, height ; return 2 * ({0} + {1}) ; [(3, 4)]
compute the absolute value of a number|return the absolute value of a number ; absolute ; number ; if {0} < 0:~    return -{0}~return {0} ; [(-3,), (4,)]
find the greatest common divisor of two numbers|return the greatest common divisor ; gcd ; a, b ; while {1}:~    {0}, {1} = {1}, {0} % {1}~return {0} ; [(12, 18), (7, 5)]
sum the digits of a number|return the digit sum of a number ; digit_sum ; number ; return sum(int(digit) for digit in str({0})) ; [(123,), (9,)]
check whether a list is sorted|tell if a list is in ascending order ; is_sorted ; items ; return all(x <= y for x, y in zip({0}, {0}[1:])) ; [([1, 2, 3],), ([2, 1],)]
capitalize every word in a string|make every word of a text start with a capital ; capitalize_words ; text ; return " ".join(word.capitalize() for word in {0}.split()) ; [("hello big world",)]
return the last item of a list|get the last item of a list ; last_item ; items ; return {0}[-1] ; [([1, 2, 3],)]
return the first item of a list|get the first item of a list ; first_item ; items ; return {0}[0] ; [([1, 2, 3],)]
find the index of an item in a list|return the position of an item, or -1 ; find_index ; items, wanted ; for index, item in enumerate({0}):~    if item == {1}:~        return index~return -1 ; [([4, 5, 6], 5), ([1], 2)]
check whether a year is a leap year|tell if a year is a leap year ; is_leap_year ; year ; return {0} % 4 == 0 and ({0} % 100 != 0 or {0} % 400 == 0) ; [(2000,), (1900,), (2024,)]
replace spaces with underscores|turn the spaces of a text into underscores ; replace_spaces ; text ; return {0}.replace(" ", "_") ; [("a b c",)]
count the lines of a text|return the number of lines of a text ; count_lines ; text ; return len({0}.split("\n")) ; [("a\nb",)]
compute the squared distance of two points|return the squared distance of two points ; squared_distance ; p, q ; return ({0}[0] - {1}[0]) ** 2 + ({0}[1] - {1}[1]) ** 2 ; [((0, 0), (3, 4))]
swap the keys and values of a dictionary|turn a dictionary around ; invert ; mapping ; return {{value: key for key, value in {0}.items()}} ; [({"a": 1},)]
sort a list with bubble sort|sort a list by swapping neighbours ; bubble_sort ; items ; result = list({0})~for i in range(len(result)):~    for j in range(len(result) - 1 - i):~        if result[j] > result[j + 1]:~            result[j], result[j + 1] = result[j + 1], result[j]~return result ; [([3, 1, 2],)]
flatten a list of lists|turn a list of lists into one list ; flatten ; lists ; result = []~for inner in {0}:~    for item in inner:~        result.append(item)~return result ; [([[1], [2, 3]],)]
clamp a number between two limits|limit a number to a range ; clamp ; number, low, high ; if {0} < {1}:~    return {1}~if {0} > {2}:~    return {2}~return {0} ; [(5, 1, 3), (0, 1, 3), (2, 1, 3)]
"""


def _parse() -> list[tuple[list[str], str, list[str], str, list[tuple[object, ...]]]]:
    rows = []
    for line in _TABLE.strip().splitlines():
        about, name, arguments, body, tests = line.split(" ; ")
        # The table is a constant of this file.
        rows.append((about.split("|"), name, arguments.split(", "), body.replace("~", "\n"), eval(tests)))
    return rows


FUNCTIONS = _parse()


def source(name: str, arguments: list[str], body: str) -> str:
    """The function as text."""
    lines = "\n".join("    " + line for line in body.format(*arguments).split("\n"))
    return f"def {name}({', '.join(arguments)}):\n{lines}"
